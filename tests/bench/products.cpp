// Speed of the CPU backend's matrix products against the machine's peaks, measured in the same run.
//
// Compiled and started by products.py. Prints for each case and number of rows GB/s of packed
// weights and GMAC/s, each also in percent of what all threads reach together when they only read
// memory, or only multiply (VPDPBUSD). Passes are short and walk through more memory than caches
// hold; all cases take turns for several rounds, and the best pass counts: on a machine that others
// use too, one long measurement would show the others.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "machine_peaks.hpp"
#include "../../kernels/cpu/multiply.hpp"

namespace {

using namespace kvt;
using namespace bench;

// Products that share an input; if gated, the second matrix is the gate of the first.
struct Layer {
  int32_t type;
  std::vector<int64_t> rows;
  int64_t cols;
  bool is_gated;
};

// Layers that follow one another, with barriers between.
struct Case {
  std::string name;
  std::vector<Layer> layers;
  int64_t n;
  double seconds = 1e9;  // the best so far

  double bytes() const {
    double sum = 0;
    for (const Layer& layer : layers) {
      for (const int64_t rows : layer.rows) sum += packed_bytes(layer.type, rows, layer.cols);
    }
    return sum;
  }
  double macs() const {
    double sum = 0;
    for (const Layer& layer : layers) {
      for (const int64_t rows : layer.rows) sum += static_cast<double>(rows * layer.cols * n);
    }
    return sum;
  }
};

struct Stage {
  std::vector<Matrix> matrices;
  std::vector<Product> products;
  Input input;
};

class Bench {
 public:
  explicit Bench(Team& team)
      : team_(team), weights_(kMemory), inputs_(16 << 20), outputs_(64 << 20) {
    fill(weights_);
    fill(inputs_);
    fill(outputs_);
  }

  void measure(Case& given) {
    best([&] {  // whose time is not only that of the products
      std::vector<Stage> stages(given.layers.size());
      for (size_t i = 0; i < stages.size(); ++i) place(given.layers[i], given.n, stages[i]);
      const double start = now();
      auto work = [&](Worker& worker) {
        for (const Stage& stage : stages) {
          const auto count = static_cast<int>(stage.products.size());
          multiply(worker, stage.input, stage.products.data(), count);
          worker.barrier();
        }
      };
      run(team_, work);
      given.seconds = std::min(given.seconds, now() - start);
    });
  }

  void measure_peaks() {
    read_ = std::max(read_, read_peak(team_, weights_));
    multiply_ = std::max(multiply_, multiply_peak(team_));
  }

  void print(const std::vector<Case>& cases) const {
    std::printf("%d threads: read %.1f GB/s, VPDPBUSD %.0f GMAC/s\n", team_.num_threads(),
                read_ / 1e9, multiply_ / 1e9);
    for (const Case& item : cases) {
      const double rate = item.bytes() / item.seconds, speed = item.macs() / item.seconds;
      std::printf("%-26s n=%-4lld %9.1f us %6.1f GB/s %3.0f %% %7.1f GMAC/s %3.0f %%\n",
                  item.name.c_str(), static_cast<long long>(item.n), item.seconds * 1e6,
                  rate / 1e9, 100 * rate / read_, speed / 1e9, 100 * speed / multiply_);
    }
  }

 private:
  // The next memory for the weights; inputs and outputs always stand in the same place.
  void place(const Layer& layer, int64_t n, Stage& stage) {
    float* out = outputs_.as<float>();
    for (const int64_t rows : layer.rows) {
      const int64_t bytes = packed_bytes(layer.type, rows, layer.cols);
      if (offset_ + bytes > kMemory) offset_ = 0;
      stage.matrices.push_back({layer.type, rows, layer.cols, weights_.as<uint8_t>() + offset_});
      offset_ += bytes;
    }
    for (const Matrix& matrix : stage.matrices) {
      stage.products.push_back({&matrix, nullptr, out, matrix.rows, nullptr, false, 0});
      out += n * matrix.rows;
    }
    input_bind(stage.input, inputs_.data(), n, layer.cols, input_form(layer.type));
    if (!layer.is_gated) return;
    stage.products[0].gate = &stage.matrices[1];
    stage.products[0].activation = kSilu;
    stage.products.pop_back();
  }

  Team& team_;
  Region weights_, inputs_, outputs_;
  int64_t offset_ = 0;
  double read_ = 0, multiply_ = 0;
};

std::vector<Layer> repeat(const std::vector<Layer>& layers, int count) {
  std::vector<Layer> result;
  for (int i = 0; i < count; ++i) result.insert(result.end(), layers.begin(), layers.end());
  return result;
}

void add_models(std::vector<Case>& cases) {
  const std::vector<Layer> smollm2 = {{kQ4_1, {576, 192, 192}, 576, false},
                                      {kQ4_1, {576}, 576, false},
                                      {kQ4_1, {1536, 1536}, 576, true},
                                      {kQ4_1, {576}, 1536, false}};
  const std::vector<Layer> gemma3 = {{kQ5_0, {1024, 256, 256}, 640, false},
                                     {kQ4_K, {640}, 1024, false},
                                     {kQ5_0, {2048, 2048}, 640, true},
                                     {kQ6_K, {640}, 2048, false}};
  std::vector<Layer> small = repeat(smollm2, 30), large = repeat(gemma3, 18);
  small.push_back({kQ4_1, {49152}, 576, false});
  large.push_back({kQ8_0, {262144}, 640, false});
  for (const int64_t n : {1, 2, 4, 6, 8, 12, 16}) {
    cases.push_back({"SmolLM2-135M, step", small, n});
    cases.push_back({"Gemma 3 270M, step", large, n});
  }
  for (const int64_t n : {32, 64, 128, 512, 2048}) {
    cases.push_back({"SmolLM2-135M, one layer", smollm2, n});
    cases.push_back({"Gemma 3 270M, one layer", gemma3, n});
  }
}

void add_shapes(std::vector<Case>& cases) {
  struct Shape {
    const char* name;
    int32_t type;
    int64_t rows, cols;
  };
  const Shape shapes[] = {
      {"Q4_1", kQ4_1, 576, 576},      {"Q4_1", kQ4_1, 192, 576},      {"Q4_1", kQ4_1, 1536, 576},
      {"Q4_1", kQ4_1, 576, 1536},     {"Q4_1", kQ4_1, 49152, 576},    {"Q4_K", kQ4_K, 640, 1024},
      {"Q4_K", kQ4_K, 640, 2048},     {"Q6_K", kQ6_K, 640, 2048},     {"Q5_0", kQ5_0, 2048, 640},
      {"Q8_0", kQ8_0, 262144, 640},   {"Q4_0", kQ4_0, 4096, 4096},    {"Q4_1", kQ4_1, 4096, 4096},
      {"Q5_0", kQ5_0, 4096, 4096},    {"Q5_1", kQ5_1, 4096, 4096},    {"Q8_0", kQ8_0, 4096, 4096},
      {"Q2_K", kQ2_K, 4096, 4096},    {"Q3_K", kQ3_K, 4096, 4096},    {"Q4_K", kQ4_K, 4096, 4096},
      {"Q5_K", kQ5_K, 4096, 4096},    {"Q6_K", kQ6_K, 4096, 4096},
      {"IQ4_NL", kIQ4_NL, 4096, 4096},
      {"IQ4_XS", kIQ4_XS, 4096, 4096}, {"MXFP4", kMXFP4, 4096, 4096}, {"F16", kF16, 2048, 2048},
      {"BF16", kBF16, 2048, 2048},    {"F32", kF32, 2048, 2048}};
  for (const Shape& shape : shapes) {
    const std::string name = std::string(shape.name) + " " + std::to_string(shape.rows) + "x" +
                             std::to_string(shape.cols);
    for (const int64_t n : {1, 16, 512}) {
      if (n == 512 && shape.rows > 10000) continue;  // so many logits are never asked for
      cases.push_back({name, {{shape.type, {shape.rows}, shape.cols, false}}, n});
    }
  }
}

}  // namespace

// Arguments: threads, rounds, and "models" or "shapes".
int main(int argc, char** argv) {
  if (argc != 4) return 1;
  Team team(std::atoi(argv[1]));
  const int rounds = std::atoi(argv[2]);
  pin(team);
  Bench bench(team);
  std::vector<Case> cases;
  if (std::string(argv[3]) == "shapes") {
    add_shapes(cases);
  } else {
    add_models(cases);
  }
  for (int round = 0; round < rounds; ++round) {
    for (Case& item : cases) {
      bench.measure_peaks();
      bench.measure(item);
    }
  }
  bench.print(cases);
}
