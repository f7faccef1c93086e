// Recurrent layers: sharing out the work.
#pragma once

#include "recurrent_conv.hpp"
#include "recurrent_row.hpp"

namespace kvt {

// An item: some heads of one group, for all rows of one chunk.
struct HeadRange {
  int64_t group, first, last;  // heads `head_of(group, first)` to before `last`
};

constexpr int64_t kItemsPerThread = 4;

// Into how many items a group's heads are cut: what they share is computed once per item.
inline int64_t num_cuts(const Worker& worker, const Mixing& mixing) {
  int64_t num_long = 0;
  for (int32_t i = 0; i < mixing.num_chunks; ++i) num_long += mixing.chunks[i].num_rows > 1;
  const int64_t num_chunks = num_long ? num_long : mixing.num_chunks;
  const int64_t items = num_chunks * mixing.mixer->num_groups;
  const int64_t wanted = (kItemsPerThread * worker.num_threads + items - 1) / items;
  return std::min(wanted, mixing.mixer->heads_per_group());
}

// Rows from `first` to the next border of pieces, at most those of the chunk that are left.
inline int64_t piece_rows(const ChunkView& chunk, int64_t first) {
  return std::min(kPiece - (chunk.start + first) % kPiece, chunk.num_rows - first);
}

inline void compute_heads(const Mixing& mixing, const ChunkView& chunk, const HeadRange& heads,
                          const Desk& desk) {
  const Mixer& mixer = *mixing.mixer;
  float* states = mixing.state(chunk) + mixer.history_values();
  const auto state_of = [&](int64_t index) {
    return states + mixer.head_of(heads.group, index) * mixer.head_values();
  };
  for (int64_t i = heads.first; chunk.start == 0 && i < heads.last; ++i)
    std::memset(state_of(i), 0, sizeof(float) * static_cast<size_t>(mixer.head_values()));
  for (int64_t row = 0, count; row < chunk.num_rows; row += count) {
    count = piece_rows(chunk, row);
    const int64_t first = chunk.first_row + row;
    const Piece piece(mixing, desk, first, count);
    piece.begin_group(heads.group);
    for (int64_t i = heads.first; i < heads.last; ++i) {
      const int64_t head = mixer.head_of(heads.group, i);
      if (count == 1) compute_row(mixing, desk, first, head, state_of(i));
      else piece.compute_head(head, state_of(i));
    }
  }
}

// A stage; no barrier behind it.
inline void scan_chunks(Worker& worker, const Mixing& mixing) {
  const Mixer& mixer = *mixing.mixer;
  const Desk desk = desk_at(reinterpret_cast<float*>(worker.scratch), mixer);
  const int64_t cuts = num_cuts(worker, mixing), across = mixer.num_groups * cuts;
  const int64_t size = (mixer.heads_per_group() + cuts - 1) / cuts;
  for (int64_t i; (i = worker.take(mixing.num_chunks * across)) >= 0;) {
    const int64_t first = i % cuts * size;
    const HeadRange heads{i % across / cuts, first,
                          std::min(first + size, mixer.heads_per_group())};
    if (heads.first < heads.last) compute_heads(mixing, mixing.chunks[i / across], heads, desk);
  }
}

// The delta net gates what it has normed, head by head; the state space norms what it has gated, by
// groups of heads.
inline void gate_row(const Mixing& mixing, int64_t row) {
  const Mixer& mixer = *mixing.mixer;
  const int64_t inner = mixer.inner();
  float* out = mixing.out + row * inner;
  const float* z = mixing.row(row) + mixer.z_at();
  if (!mixer.is_delta()) gate_values(out, z, inner, KVT_SILU);
  const int64_t size = mixer.is_delta() ? mixer.value_dim : inner / mixer.num_groups;
  for (int64_t first = 0; first < inner; first += size) {
    const float* weight = mixer.norm + (mixer.is_delta() ? 0 : first);
    rms_norm_row(out + first, weight, mixing.eps, size, out + first);
  }
  if (mixer.is_delta()) gate_values(out, z, inner, KVT_SILU);
}

inline void mix(Worker& worker, const Mixing& mixing) {
  convolve_chunks(worker, mixing);
  if (!mixing.mixer->has_heads()) return;
  worker.barrier();
  scan_chunks(worker, mixing);
  worker.barrier();
  for (int64_t row; (row = worker.take(mixing.num_rows)) >= 0;) gate_row(mixing, row);
}

inline int64_t mix_scratch(const Mixer& mixer) {
  return mixer.has_heads() ? 4 * Desk::size(mixer) : 0;
}

}  // namespace kvt
