// Speed of the CPU backend's attention against the machine's peaks, measured in the same run.
//
// Compiled and started by attention.py. Decode: one row at 4,096 tokens of context in all layers of
// a model, whose caches together are larger than the processor's, blocks in random order; GB/s of
// keys and values. Prefill: a prompt of 6,000 tokens in chunks of 512 in one layer; GMAC/s. In
// percent of what all threads reach together when they only read memory, or only multiply pairs of
// bf16 (where the library does that) or f32. Every figure is the best of several passes.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "../../kernels/cpu/attention.hpp"

namespace {

using namespace kvt;

constexpr double kSeconds = 0.4;  // of passes for one figure
constexpr int kMinPasses = 5;
constexpr int32_t kBlockSize = 16, kContext = 4096, kPrompt = 6000, kChunk = 512;

struct Model {
  const char* name;
  int32_t heads, kv_heads, head_dim;
  int32_t layers;
};
constexpr Model kModels[] = {{"SmolLM2-135M", 9, 3, 64, 30}, {"Gemma 3 270M, full", 4, 1, 256, 18}};

struct Type {
  const char* name;
  int32_t type;
};
constexpr Type kTypes[] = {{"f16", KV_F16}, {"q8_0", KV_Q8_0}, {"q4_0", KV_Q4_0}, {"f32", KV_F32}};

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

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

// Keep the compiler from dropping a computation.
void use(Floats x) {
  volatile float value = sum(x);
  (void)value;
}

double read_peak(Team& team) {
  constexpr int64_t kCount = int64_t{48} << 20, kPiece = int64_t{64} << 10;
  const Region memory(kCount * 4);
  std::fill_n(memory.as<float>(), kCount, 1.0f);
  auto work = [&](Worker& worker) {
    Floats sums[4] = {};
    for (int64_t i; (i = worker.take(kCount / kPiece)) >= 0;) {
      const float* const piece = memory.as<float>() + i * kPiece;
      for (int64_t at = 0; at < kPiece; at += 64) {
        for (int k = 0; k < 4; ++k) {
          __builtin_prefetch(piece + at + 16 * k + 1024);
          sums[k] = sums[k] + Floats::load(piece + at + 16 * k);
        }
      }
    }
    use((sums[0] + sums[1]) + (sums[2] + sums[3]));
  };
  return kCount * 4 / best([&] { run(team, work); });
}

// Multiply-accumulates per second of one arithmetic.
template <class Arithmetic>
double multiply_peak(Team& team) {
  constexpr int64_t kTurns = 20000;
  constexpr int kChains = kTileRows * kTileColumns;
  auto work = [&](Worker&) {
    Floats sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = Floats::all(1.0f + i);  // no two alike
    const Floats a = Floats::all(0.5f);
    for (int64_t turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sums[i] = Arithmetic::step(sums[i], a, a);
    }
    for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
    use(sums[0]);
  };
  const double lanes = 16.0 * Arithmetic::kPerLane * team.num_threads();
  return lanes * kTurns * kChains / best([&] { run(team, work); });
}

// Caches of several layers, with random numbers in blocks that lie anywhere.
class Layers {
 public:
  Layers(const CacheLayout& layout, int32_t num_layers, int32_t num_tokens)
      : blocks_(static_cast<size_t>((num_tokens + kBlockSize - 1) / kBlockSize)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::iota(blocks_.begin(), blocks_.end(), 0);
    std::shuffle(blocks_.begin(), blocks_.end(), random);
    const auto count = static_cast<int64_t>(blocks_.size());
    const int64_t keys = key_block_bytes(layout) * count, values = value_block_bytes(layout) * count;
    bytes_ = num_layers * (keys + values);
    memory_ = Region(static_cast<size_t>(bytes_));
    std::vector<float> row(static_cast<size_t>(layout.kv_heads * layout.head_dim));
    for (int32_t i = 0; i < num_layers; ++i) {
      uint8_t* const start = memory_.as<uint8_t>() + i * (keys + values);
      caches_.push_back({layout, start, start + keys});
    }
    for (int32_t position = 0; position < num_tokens; ++position) {
      for (float& x : row) x = normal(random);
      const int64_t block = blocks_[static_cast<size_t>(position / kBlockSize)];
      for (const Cache& cache : caches_) {
        cache_write(cache, block, position % kBlockSize, row.data(), row.data());
      }
    }
  }

  const std::vector<Cache>& caches() const { return caches_; }
  const int32_t* blocks() const { return blocks_.data(); }
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<int32_t> blocks_;
  int64_t bytes_ = 0;
  Region memory_;
  std::vector<Cache> caches_;
};

// Best time of rows start .. start + num_rows - 1 in all layers.
double time_of(Team& team, const Model& model, const Layers& layers, int32_t start,
               int32_t num_rows) {
  const CacheLayout& layout = layers.caches()[0].layout;
  const size_t row = static_cast<size_t>(model.heads * model.head_dim);
  std::vector<float> q(row * static_cast<size_t>(num_rows), 0.1f), out(q.size());
  const int64_t shared_bytes = attention_shared_bytes(layout, model.heads, num_rows, kPrompt);
  const Region shared(static_cast<size_t>(shared_bytes));
  const ChunkView chunk{0, num_rows, start, layers.blocks()};
  Attention call{nullptr, q.data(), out.data(),    &chunk,  1, model.heads, 0.125f, 0.0f, 0,
                 nullptr, shared.data(), shared_bytes};
  auto work = [&](Worker& worker) {
    for (const Cache& cache : layers.caches()) {
      Attention one = call;
      one.cache = &cache;
      attend(worker, one);
      worker.barrier();
    }
  };
  return best([&] { run(team, work); });
}

struct Peaks {
  double read, multiply_pairs, multiply_singles;
};

void measure(Team& team, const Model& model, const Type& type, const Peaks& peaks) {
  const CacheLayout layout{type.type,      type.type,      kBlockSize,
                           model.kv_heads, model.head_dim, model.head_dim};
  team.reserve_scratch(static_cast<size_t>(attention_worker_bytes(layout, model.heads)));
  const Layers many(layout, model.layers, kContext);
  const double step = time_of(team, model, many, kContext - 1, 1);
  const double rate = static_cast<double>(many.bytes()) / step;
  const Layers one(layout, 1, kPrompt);
  double prompt = 0.0, macs = 0.0;
  for (int32_t start = 0; start < kPrompt; start += kChunk) {
    const int32_t count = std::min(kChunk, kPrompt - start);
    prompt += time_of(team, model, one, start, count);
    const double visible = 0.5 * count * (2.0 * start + count + 1);
    macs += visible * 2 * model.heads * model.head_dim;
  }
  const double peak = type.type == KV_F32 ? peaks.multiply_singles : peaks.multiply_pairs;
  std::printf("%-18s %-5s decode at %d: %5.2f ms, %5.1f GB/s %3.0f %%   "
              "prefill of %d: %.3f ms per token, %4.0f GMAC/s %3.0f %%\n",
              model.name, type.name, kContext, step * 1e3, rate / 1e9, 100 * rate / peaks.read,
              kPrompt, prompt * model.layers / kPrompt * 1e3, macs / prompt / 1e9,
              100 * macs / prompt / peak);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Team team(argc > 1 ? std::atoi(argv[1]) : 2);
  const Peaks peaks{read_peak(team), multiply_peak<ArithmeticOf<KV_F16>::Type>(team),
                    multiply_peak<Singles>(team)};
  std::printf("%d threads: read %.1f GB/s, %s %.0f GMAC/s, f32 %.0f GMAC/s\n", team.num_threads(),
              peaks.read / 1e9, ArithmeticOf<KV_F16>::Type::kPerLane == 2 ? "bf16" : "f32",
              peaks.multiply_pairs / 1e9, peaks.multiply_singles / 1e9);
  for (const Model& model : kModels) {
    for (const Type& type : kTypes) measure(team, model, type, peaks);
  }
}
