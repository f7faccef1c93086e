// Speed of the CPU backend's matrix products against the machine's peaks, measured in the same run.
//
// Compiled and started by products.py. Prints for each shape and number of rows GB/s of packed
// weights and GMAC/s, each also in percent of what all threads reach together when they only read
// memory, or only multiply (VPDPBUSD). Weights lie in memory several times, so that no cache holds
// them. Every figure is the best of several passes.
#if defined(__linux__)
#include <sched.h>
#endif

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../kernels/cpu/multiply.hpp"

namespace {

using namespace kvt;

constexpr int64_t kMemory = int64_t{192} << 20;  // more than caches hold
constexpr double kSeconds = 0.25;                // of passes for one figure
constexpr int kMinPasses = 5;

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// The best time of one call.
template <class Pass>
double best(Pass pass) {
  double result = 1e9;
  const double end = now() + kSeconds;
  for (int i = 0; i < kMinPasses || now() < end; ++i) {
    const double start = now();
    pass();
    result = std::min(result, now() - start);
  }
  return result;
}

template <class Work>
void run(Team& team, Work& work) {
  team.run([](Worker& worker, void* argument) { (*static_cast<Work*>(argument))(worker); }, &work);
}

// One processor for each thread: the system is slow to notice that two share one.
void pin(Team& team) {
#if defined(__linux__)
  auto work = [](Worker& worker) {
    cpu_set_t processors;
    CPU_ZERO(&processors);
    CPU_SET(worker.id, &processors);
    sched_setaffinity(0, sizeof processors, &processors);
  };
  run(team, work);
#else
  (void)team;
#endif
}

// Bytes that are ordinary numbers as weights and as scales of all types.
Region weights_memory(int64_t bytes) {
  Region memory(static_cast<size_t>(bytes));
  uint32_t state = 1;
  for (int64_t i = 0; i < bytes; i += 4) {
    state = state * 1664525u + 1013904223u;
    store(memory.as<uint8_t>() + i, 0x28282828u | ((state >> 7) & 0x07070707u));
  }
  return memory;
}

double read_peak(Team& team) {
  const Region memory = weights_memory(kMemory);
  std::vector<uint64_t> results(64 * team.num_threads());
  auto work = [&](Worker& worker) {
    constexpr int64_t kPiece = 256 << 10;
    U8x64 sums[4] = {};
    for (int64_t i; (i = worker.take(kMemory / kPiece)) >= 0;) {
      const auto* piece = memory.as<uint8_t>() + i * kPiece;
      for (int64_t at = 0; at < kPiece; at += 256) {
        for (int k = 0; k < 4; ++k) {
          __builtin_prefetch(piece + at + 64 * k + 4096);
          sums[k] += load<U8x64>(piece + at + 64 * k);
        }
      }
    }
    const U8x64 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    results[64 * worker.id] += sum[0];
  };
  return kMemory / best([&] { run(team, work); });
}

// Multiply-accumulates per second of the instruction that all integer kernels are made of.
double multiply_peak(Team& team) {
#if defined(__AVX512VNNI__)
  constexpr int64_t kTurns = 20000, kChains = 16;
  std::vector<int32_t> results(64 * team.num_threads());
  auto work = [&](Worker& worker) {
    const __m512i a = _mm512_set1_epi8(3);  // one register for both: no wait for reading two
    __m512i sums[kChains];
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_si512();
    for (int64_t turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) {
        sums[i] = _mm512_dpbusd_epi32(sums[i], a, a);
        asm volatile("" : "+v"(sums[i]));
      }
    }
#pragma GCC unroll 16
    for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    results[64 * worker.id] += _mm512_reduce_add_epi32(sums[0]);
  };
  const double macs = 64.0 * kTurns * kChains * team.num_threads();
  return macs / best([&] { run(team, work); });
#else
  (void)team;
  return 1e99;
#endif
}

// Products that share an input, and how often a model has them.
struct Layer {
  const char* name;
  int32_t type;
  std::vector<int64_t> rows;
  int64_t cols;
  bool is_gated;  // the second matrix is the gate of the first
};

struct Stage {
  std::vector<Matrix> matrices;
  std::vector<Product> products;
  Input input;
};

class Bench {
 public:
  Bench(Team& team, double read, double multiply)
      : team_(team), read_(read), multiply_(multiply), memory_(weights_memory(kMemory)) {}

  // Time of all layers in order with barriers between, repeated over memory; prints one line.
  void measure(const char* name, const std::vector<Layer>& layers, int64_t n, bool is_cold) {
    int64_t bytes = 0, macs = 0;
    for (const Layer& layer : layers) {
      for (const int64_t rows : layer.rows) {
        bytes += packed_bytes(layer.type, rows, layer.cols);
        macs += rows * layer.cols * n;
      }
    }
    const int64_t copies = is_cold ? std::max<int64_t>(1, kMemory / bytes) : 1;
    std::vector<Stage> stages(layers.size() * static_cast<size_t>(copies));
    Region inputs, outputs;
    place(layers, n, stages, inputs, outputs);
    auto work = [&](Worker& worker) {
      for (const Stage& stage : stages) {
        multiply(worker, stage.input, stage.products.data(),
                 static_cast<int>(stage.products.size()));
        worker.barrier();
      }
    };
    const double time = best([&] { run(team_, work); }) / static_cast<double>(copies);
    const double rate = bytes / time, speed = macs / time;
    std::printf("%-34s n=%-4lld %8.1f us %6.1f GB/s %3.0f %% %7.1f GMAC/s %3.0f %%\n", name,
                static_cast<long long>(n), time * 1e6, rate / 1e9, 100 * rate / read_, speed / 1e9,
                100 * speed / multiply_);
    std::fflush(stdout);
  }

 private:
  void place(const std::vector<Layer>& layers, int64_t n, std::vector<Stage>& stages,
             Region& inputs, Region& outputs) {
    int64_t in = 0, out = 0;
    for (const Layer& layer : layers) {
      in = std::max(in, input_bytes(n, layer.cols, input_form(layer.type)));
      for (const int64_t rows : layer.rows) out = std::max(out, n * rows * 4);
    }
    inputs = weights_memory(in);
    outputs = Region(static_cast<size_t>(3 * out));
    int64_t offset = 0;
    for (size_t i = 0; i < stages.size(); ++i) {
      const Layer& layer = layers[i % layers.size()];
      Stage& stage = stages[i];
      for (const int64_t rows : layer.rows) {
        const int64_t bytes = packed_bytes(layer.type, rows, layer.cols);
        if (offset + bytes > kMemory) offset = 0;
        stage.matrices.push_back({layer.type, rows, layer.cols, memory_.as<uint8_t>() + offset});
        offset += bytes;
      }
      input_bind(stage.input, inputs.data(), n, layer.cols, input_form(layer.type));
      float* target = outputs.as<float>();
      for (const Matrix& matrix : stage.matrices) {
        stage.products.push_back({&matrix, nullptr, target, matrix.rows, nullptr, false, 0});
        target += out / 4;
      }
      if (!layer.is_gated) continue;
      stage.products[0].gate = &stage.matrices[1];
      stage.products[0].activation = kSilu;
      stage.products.pop_back();
    }
  }

  Team& team_;
  double read_, multiply_;
  Region memory_;
};

std::vector<Layer> smollm2(int32_t type) {
  std::vector<Layer> layers;
  for (int i = 0; i < 30; ++i) {
    layers.push_back({"qkv", type, {576, 192, 192}, 576, false});
    layers.push_back({"o", type, {576}, 576, false});
    layers.push_back({"up", type, {1536, 1536}, 576, true});
    layers.push_back({"down", type, {576}, 1536, false});
  }
  return layers;
}

std::vector<Layer> gemma3() {
  std::vector<Layer> layers;
  for (int i = 0; i < 18; ++i) {
    layers.push_back({"qkv", kQ5_0, {1024, 256, 256}, 640, false});
    layers.push_back({"o", kQ4_K, {640}, 1024, false});
    layers.push_back({"up", kQ5_0, {2048, 2048}, 640, true});
    layers.push_back({"down", i % 2 ? kQ6_K : kQ4_K, {640}, 2048, false});
  }
  return layers;
}

void measure_shapes(Bench& bench) {
  struct Shape {
    const char* type_name;
    int32_t type;
    int64_t rows, cols;
  };
  const Shape shapes[] = {
      {"Q4_1", kQ4_1, 576, 576},     {"Q4_1", kQ4_1, 192, 576},      {"Q4_1", kQ4_1, 1536, 576},
      {"Q4_1", kQ4_1, 576, 1536},    {"Q4_1", kQ4_1, 49152, 576},    {"Q4_K", kQ4_K, 640, 1024},
      {"Q4_K", kQ4_K, 640, 2048},    {"Q6_K", kQ6_K, 640, 2048},     {"Q5_0", kQ5_0, 2048, 640},
      {"Q8_0", kQ8_0, 256, 640},     {"Q8_0", kQ8_0, 262144, 640},   {"Q4_0", kQ4_0, 4096, 4096},
      {"Q5_1", kQ5_1, 4096, 4096},   {"Q2_K", kQ2_K, 4096, 4096},    {"Q3_K", kQ3_K, 4096, 4096},
      {"Q5_K", kQ5_K, 4096, 4096},   {"IQ4_NL", kIQ4_NL, 4096, 4096}, {"IQ4_XS", kIQ4_XS, 4096, 4096},
      {"MXFP4", kMXFP4, 4096, 4096}, {"F16", kF16, 2048, 2048},      {"BF16", kBF16, 2048, 2048},
      {"F32", kF32, 2048, 2048}};
  for (const Shape& shape : shapes) {
    char name[64];
    std::snprintf(name, sizeof name, "%s %lldx%lld", shape.type_name,
                  static_cast<long long>(shape.rows), static_cast<long long>(shape.cols));
    for (const int64_t n : {1, 16, 512}) {
      if (n == 512 && shape.rows > 10000) continue;  // logits of so many rows are never asked for
      bench.measure(name, {{name, shape.type, {shape.rows}, shape.cols, false}}, n, n <= 16);
    }
  }
}

void measure_models(Bench& bench) {
  const std::vector<Layer> small = smollm2(kQ4_1), large = gemma3();
  const Layer small_head{"head", kQ4_1, {49152}, 576, false};
  const Layer large_head{"head", kQ8_0, {262144}, 640, false};
  for (const int64_t n : {1, 2, 3, 4, 6, 8, 12, 16}) {
    auto all = small;
    all.push_back(small_head);
    bench.measure("SmolLM2-135M Q4_1, step", all, n, true);
  }
  for (const int64_t n : {32, 64, 128, 512, 2048}) {
    bench.measure("SmolLM2-135M Q4_1, prefill", small, n, false);
  }
  for (const int64_t n : {1, 2, 4, 8, 16}) {
    auto all = large;
    all.push_back(large_head);
    bench.measure("Gemma 3 270M Q4_K_M, step", all, n, true);
  }
  for (const int64_t n : {128, 512}) bench.measure("Gemma 3 270M, prefill", large, n, false);
}

}  // namespace

int main(int argc, char** argv) {
  Team team(argc > 1 ? std::atoi(argv[1]) : 2);
  pin(team);
  const double read = read_peak(team), multiply = multiply_peak(team);
  std::printf("%d threads: read %.1f GB/s, VPDPBUSD %.0f GMAC/s\n", team.num_threads(), read / 1e9,
              multiply / 1e9);
  Bench bench(team, read, multiply);
  const bool is_short = argc > 2;
  measure_models(bench);
  if (!is_short) measure_shapes(bench);
}
