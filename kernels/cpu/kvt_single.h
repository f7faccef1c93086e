/* Single operations of the CPU kernels, for tests and measurements. Rules as in kvt.h. */
#ifndef KVT_SINGLE_H
#define KVT_SINGLE_H

#include "kvt_step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x [rows, size], weight [size] -> out [rows, size] */
KVT_API int32_t kvt_rms_norm(const float* x, const float* weight, float eps, int64_t rows,
                             int64_t size, float* out);
/* cos and sin [rows, num_rotated / 2] of positions [rows]; factors or null; `rope.factors` is not
 * read */
KVT_API int32_t kvt_rope_angles(const kvt_rope* rope, const float* factors,
                                const int64_t* positions, int64_t rows, float* cos, float* sin);
/* x [rows, heads, head_dim] in place */
KVT_API int32_t kvt_rope_rotate(float* x, int64_t rows, int64_t heads, int64_t head_dim,
                                const float* cos, const float* sin, int32_t num_rotated,
                                int32_t style);
/* out[i] = act(gate[i]) * up[i] */
KVT_API int32_t kvt_gated(const float* gate, const float* up, int64_t count, int32_t activation,
                          float* out);
/* x[i] = cap * tanh(x[i] / cap) */
KVT_API int32_t kvt_softcap(float* x, int64_t count, float cap);
/* One row of a packed matrix -> out [cols] */
KVT_API int32_t kvt_dequantise_row(const kvt_matrix* matrix, int64_t row, float* out);
/* out [n, rows] (+)= x [n, cols] W^T + bias (or null); gate or null: out = act(x gate^T) (x W^T).
 * n 1 or more. */
KVT_API int32_t kvt_multiply(kvt_team* team, const kvt_matrix* matrix, const kvt_matrix* gate,
                             int32_t activation, const float* bias, const float* x, int64_t n,
                             int32_t accumulate, float* out);
/* The same with 1 to 3 matrices that share x, in one stage; out[i] [n, rows of matrix i]. */
KVT_API int32_t kvt_multiply_many(kvt_team* team, const kvt_matrix* matrices, int32_t num_matrices,
                                  const float* x, int64_t n, float* const* out);
typedef struct {               /* experts by themselves; vectors are float32 */
  const kvt_matrix* stacks;    /* gate, up, down */
  const float* biases[3];      /* of gate, up, down: [stack, rows] each, or null */
  const float* selection_bias; /* [stack] or null; the index in `routing` is not read */
  kvt_routing routing;
  int32_t num_used, activation;
} kvt_experts_call;

/* Experts from their router's logits: x [n, cols], logits [n, stack] -> out [n, rows of down].
 * factors [n] or null: what out held counts so many times, else nothing. */
KVT_API int32_t kvt_experts(kvt_team* team, const kvt_experts_call* call, const float* logits,
                            const float* x, int64_t n, const float* factors, float* out);
/* One token's k [kv_heads, head_dim] and v [kv_heads, value_dim] into place `place` of a block. */
KVT_API int32_t kvt_cache_write(const kvt_cache* cache, int64_t block, int32_t place,
                                const float* k, const float* v);
KVT_API int32_t kvt_cache_copy(const kvt_cache* cache, int64_t source, int64_t target,
                               int32_t num_tokens);
/* q [N, heads * head_dim] -> out [N, heads * value_dim]. `attention` with its indices unread;
 * sinks [heads] or null; tables [num_chunks + 1] into blocks, as in a step with one group. */
KVT_API int32_t kvt_attend(kvt_team* team, const kvt_cache* cache, const kvt_attention* attention,
                           const float* sinks, const kvt_chunk* chunks, int32_t num_chunks,
                           const int32_t* blocks, const int64_t* tables, const float* q,
                           float* out);
/* Rows of a recurrent layer behind its products: mixed [N, values of a row], changed, -> out
 * [N, heads * value_dim] (short convolution: [N, channels]). slots [num_chunks]; of `state` the
 * group, of the chunks is_sampled is not read. */
KVT_API int32_t kvt_mix(kvt_team* team, const kvt_recurrent* recurrent, const kvt_vector* vectors,
                        int32_t num_vectors, const kvt_state* state, float eps,
                        const kvt_chunk* chunks, const int32_t* slots, int32_t num_chunks,
                        float* mixed, float* out);
/* out [n, rows] += changes to a matrix of n rows x [n, cols]: the uses in order, for all rows. */
KVT_API int32_t kvt_low_rank_add(kvt_team* team, const kvt_low_rank* parts, const float* scales,
                                 int32_t num_parts, const float* x, int64_t n, int64_t cols,
                                 int64_t rows, float* out);
/* Results of a step's SAMPLE for logits [num_sampled, vocab_size]: of `step` samples, num_sampled,
 * top_stride and the out arrays are read. */
KVT_API int32_t kvt_sample_rows(kvt_team* team, const float* logits, int64_t vocab_size,
                                const kvt_step* step);
/* Nanoseconds per barrier, the smallest mean of several runs. */
KVT_API double kvt_barrier_nanoseconds(kvt_team* team);

#ifdef __cplusplus
}
#endif

#endif /* KVT_SINGLE_H */
