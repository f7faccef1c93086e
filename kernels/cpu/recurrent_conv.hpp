// Causal convolution of each channel along positions.
//
// A row's sum has one order, so its bits do not depend on the chunk it comes in.
#pragma once

#include "multiply_activation.hpp"
#include "recurrent.hpp"

namespace kvt {

constexpr int64_t kMaxConvWidth = 64;
constexpr int64_t kConvChannels = 256;  // of one item

// Sixteen channels of a chunk, or as many as there are.
struct ConvStrip {
  const Mixing& mixing;
  const ChunkView& chunk;
  int64_t channel, count;

  const Mixer& mixer() const { return *mixing.mixer; }
  float* history() const { return mixing.state(chunk) + channel; }  // rows are `channels` apart
};

// put(row, sum) for all rows of the chunk, last first, where value(row) is the input in a row of the
// chunk: put may overwrite it. The history moves on.
template <class Value, class Put>
inline void convolve(const ConvStrip& strip, Value value, Put put) {
  const Mixer& mixer = strip.mixer();
  const int64_t before = mixer.width - 1, num_rows = strip.chunk.num_rows;
  Floats old[kMaxConvWidth], weights[kMaxConvWidth], kept[kMaxConvWidth];
  for (int64_t j = 0; j < before; ++j) {
    const float* from = strip.history() + j * mixer.channels;
    old[j] = strip.chunk.start ? load_some(from, strip.count) : Floats::zero();
  }
  for (int64_t j = 0; j < mixer.width; ++j)
    weights[j] = load_some(mixer.conv + j * mixer.channels + strip.channel, strip.count);
  const Floats bias = mixer.conv_bias ? load_some(mixer.conv_bias + strip.channel, strip.count)
                                      : Floats::zero();
  // Input number i, counted from the start of the history.
  const auto input = [&](int64_t i) { return i < before ? old[i] : value(i - before); };
  for (int64_t j = 0; j < before; ++j) kept[j] = input(num_rows + j);
  for (int64_t row = num_rows - 1; row >= 0; --row) {
    Floats sum = input(row) * weights[0];
    for (int64_t j = 1; j < mixer.width; ++j) sum = fma(input(row + j), weights[j], sum);
    put(row, sum + bias);
  }
  for (int64_t j = 0; j < before; ++j)
    store_some(strip.history() + j * mixer.channels, kept[j], strip.count);
}

// Convolution and SiLU, in place.
inline void convolve_in_place(const ConvStrip& strip) {
  const Mixer& mixer = strip.mixer();
  float* first = strip.mixing.row(strip.chunk.first_row) + mixer.conv_at() + strip.channel;
  const int64_t stride = mixer.row_values(), count = strip.count;
  convolve(
      strip, [=](int64_t row) { return load_some(first + row * stride, count); },
      [=](int64_t row, Floats sum) { store_some(first + row * stride, silu(sum), count); });
}

// out = c * conv(b * x).
inline void convolve_gated(const ConvStrip& strip) {
  const int64_t channels = strip.mixer().channels, stride = 3 * channels, count = strip.count;
  const float* b = strip.mixing.row(strip.chunk.first_row) + strip.channel;
  const float *c = b + channels, *x = c + channels;
  float* out = strip.mixing.out + strip.chunk.first_row * channels + strip.channel;
  convolve(
      strip,
      [=](int64_t row) {
        return load_some(b + row * stride, count) * load_some(x + row * stride, count);
      },
      [=](int64_t row, Floats sum) {
        store_some(out + row * channels, load_some(c + row * stride, count) * sum, count);
      });
}

// A stage; no barrier behind it.
inline void convolve_chunks(Worker& worker, const Mixing& mixing) {
  const Mixer& mixer = *mixing.mixer;
  const int64_t across = (mixer.channels + kConvChannels - 1) / kConvChannels;
  for (int64_t i; (i = worker.take(mixing.num_chunks * across)) >= 0;) {
    const ChunkView& chunk = mixing.chunks[i / across];
    const int64_t first = i % across * kConvChannels;
    const int64_t end = std::min(first + kConvChannels, mixer.channels);
    for (int64_t channel = first; channel < end; channel += kWidth) {
      const ConvStrip strip{mixing, chunk, channel, std::min(kWidth, end - channel)};
      if (mixer.has_heads()) convolve_in_place(strip);
      else convolve_gated(strip);
    }
  }
}

}  // namespace kvt
