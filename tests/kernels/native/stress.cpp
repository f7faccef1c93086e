// The kernels under a sanitizer: one program, built by test_cpu_sanitizers.py. Ends with 0 and prints
// nothing if all is well.

#include "library.cpp"

#include "stress_faults.hpp"
#include "stress_recurrent.hpp"

int main() {
  stress::test_team();
  stress::test_step_faults();
  stress::test_model_faults();
  stress::test_batches();
  stress::test_recurrent();
  return 0;
}
