/* The C interface of the CPU kernels: with kvt_op.h, kvt_step.h and kvt_single.h, all that Python
 * sees. One library per instruction set has it.
 *
 * 1. Structures hold fixed-width fields, in order of size, without hidden padding on any 64-bit
 *    machine; kvt_struct_bytes() lets a caller check its own declarations.
 * 2. Functions return KVT_OK (0, or a count where said) or a negative KVT_E_ code, and throw
 *    nothing; kvt_error_text() says for the calling thread what was wrong. After an error of
 *    kvt_step_run nothing was computed.
 * 3. Nothing is copied from the caller's arrays except where said: weights, vectors, caches and
 *    adapters stay where they are and must outlive what refers to them. The description itself
 *    (all arrays of kvt_model_desc and kvt_step) is only read during the call.
 * 4. One team, and the models that use it, serve one calling thread at a time.
 *
 * N: rows of a step (one row, one token); M: sampled rows; V: vocabulary. Matrices are row-major,
 * [out, in]. Types of weights and caches are ggml's numbers.
 */
#ifndef KVT_H
#define KVT_H

#include <stdint.h>

#include "kvt_op.h"

#if defined(_WIN32)
#define KVT_API __declspec(dllexport)
#else
#define KVT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVT_ABI_VERSION 4

enum {
  KVT_OK = 0,
  KVT_E_ARGUMENT = -1, /* a size, index or pointer that cannot be: a bug of the caller */
  KVT_E_MEMORY = -2,   /* no memory, or no thread */
  KVT_E_TYPE = -3,     /* a type that is not supported */
  KVT_E_BUSY = -4      /* the team is running something for another thread */
};

/* ---- the library ------------------------------------------------------------------------- */

enum { /* what the processor and the system support, as bits; instruction sets of kvt_isa() */
  KVT_HAS_AVX2 = 1,    /* AVX2, FMA, F16C, BMI2 */
  KVT_HAS_AVX512 = 2   /* AVX-512 F, BW, DQ, VL, CD, VNNI, VBMI, BF16 */
};

KVT_API int32_t kvt_abi_version(void);       /* KVT_ABI_VERSION */
KVT_API const char* kvt_isa(void);           /* what it was compiled for: portable, avx2, avx512 */
KVT_API const char* kvt_digest(void);        /* of its sources (KVT_SOURCE_DIGEST), or "" */
KVT_API uint32_t kvt_features(void);         /* KVT_HAS_ bits of this machine; never fails */
KVT_API const char* kvt_error_text(void);    /* of this thread's last error; static text */

enum {
  KVT_STRUCT_MATRIX, KVT_STRUCT_VECTOR, KVT_STRUCT_CACHE, KVT_STRUCT_ROPE, KVT_STRUCT_ATTENTION,
  KVT_STRUCT_OP, KVT_STRUCT_MODEL, KVT_STRUCT_LOW_RANK, KVT_STRUCT_CHUNK, KVT_STRUCT_COPY,
  KVT_STRUCT_SEGMENT, KVT_STRUCT_USE, KVT_STRUCT_SAMPLE, KVT_STRUCT_STEP, KVT_STRUCT_STATE,
  KVT_STRUCT_RECURRENT
};
KVT_API int64_t kvt_struct_bytes(int32_t which); /* sizeof; KVT_E_ARGUMENT for another number */

/* ---- threads and memory ------------------------------------------------------------------ */

typedef struct kvt_team kvt_team;

/* num_threads 1 to 1024, the caller's included. */
KVT_API int32_t kvt_team_new(int32_t num_threads, kvt_team** team);
KVT_API void kvt_team_free(kvt_team* team); /* null: nothing; models that use it are freed first */
KVT_API void kvt_team_wake(kvt_team* team); /* a step comes soon: threads that sleep wake up */

/* Zeroed anonymous memory on huge pages, aligned to 64 bytes at least; null where there is none.
 * Takes no RAM until it is touched. Freed with the same number of bytes. */
KVT_API uint8_t* kvt_alloc(int64_t bytes);
KVT_API void kvt_free(uint8_t* memory, int64_t bytes);

/* ---- weights ----------------------------------------------------------------------------- */

/* Bytes of a packed matrix; KVT_E_TYPE: not supported. */
KVT_API int64_t kvt_packed_bytes(int32_t type, int64_t rows, int64_t cols);
/* GGUF rows to the packed form, on all threads. source: rows in the file's layout, contiguous;
 * target: kvt_packed_bytes() bytes, aligned to 64. */
KVT_API int32_t kvt_pack(kvt_team* team, int32_t type, const uint8_t* source, int64_t rows,
                         int64_t cols, uint8_t* target);

typedef struct {        /* a packed matrix, or a stack of them, one behind the other */
  int64_t rows, cols;   /* outputs, inputs */
  const uint8_t* data;  /* aligned to 64 */
  int64_t bytes;        /* at data: must be what kvt_packed_bytes() says, times the stack */
  int32_t type;
  int32_t stack;        /* matrices, 1 or more: one per expert, or per head; else there is one */
} kvt_matrix;

typedef struct { /* norm weight, bias (of a stack: one behind the other), rope factors, sinks */
  const float* data;
  int64_t size;
} kvt_vector;

/* ---- state ------------------------------------------------------------------------------- */

typedef struct { /* K and V of one layer: num_blocks blocks of block_size tokens each */
  uint8_t* keys;          /* num_blocks * kvt_key_block_bytes(), aligned to 64 */
  uint8_t* values;        /* num_blocks * kvt_value_block_bytes() */
  int64_t num_blocks;
  int32_t key_type;       /* 0 F32, 1 F16, 8 Q8_0, 2 Q4_0 */
  int32_t value_type;
  int32_t block_size;     /* tokens, a multiple of 16 */
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  int32_t group;          /* index of its block tables in a step */
  int32_t is_latent;      /* 1: a key's first value_dim numbers are the value; values and value_type
                             are not read */
} kvt_cache;

/* Bytes of one block of one layer; KVT_E_TYPE or KVT_E_ARGUMENT for what is not supported. Only
 * the fields from key_type to value_dim are read. */
KVT_API int64_t kvt_key_block_bytes(const kvt_cache* cache);
KVT_API int64_t kvt_value_block_bytes(const kvt_cache* cache);

typedef struct {      /* states of one recurrent layer, float32 */
  float* data;        /* slot s begins at data + s * stride; aligned to 64 */
  int64_t stride;     /* floats, a multiple of 16, at least kvt_state_values() */
  int64_t num_slots;
  int32_t group;      /* its block tables have one entry, the slot of the chunk's request */
  int32_t reserved;   /* 0 */
} kvt_state;

enum { KVT_SHORT_CONV = 0, KVT_DELTA_NET = 1, KVT_STATE_SPACE = 2 };

typedef struct {          /* a recurrent layer; sizes that its kind does not have are 0 */
  int32_t kind;
  int32_t state;          /* index of the layer's kvt_state */
  int32_t width;          /* positions that one output of the convolution sees, 2 to 64 */
  int32_t channels;       /* of the convolution */
  int32_t num_heads;      /* a multiple of num_groups */
  int32_t num_groups;     /* heads with queries and keys in common */
  int32_t key_dim;        /* of a query and a key: the state's size in a state space */
  int32_t value_dim;      /* of a head */
  int32_t is_tiled;       /* 1: head h reads group h mod num_groups; else h / (heads / groups) */
  int32_t has_fused_gates; /* 1: betas and alphas of each group, else all betas, then all alphas */
  int32_t conv;           /* vector [width, channels] */
  int32_t conv_bias;      /* vector [channels] or -1 */
  int32_t dt_bias;        /* vector [num_heads] */
  int32_t decay;          /* vector [num_heads]: log decay = softplus(dt + dt_bias) * decay */
  int32_t skip;           /* vector [num_heads] or -1: a state space's D */
  int32_t norm;           /* vector: delta net [value_dim], state space [num_heads * value_dim] */
} kvt_recurrent;

/* Floats of one slot: history [width - 1, channels], then per head S [key_dim, value_dim], whose
 * rows are padded to multiples of 16; indices are not read. KVT_E_ARGUMENT for what cannot be. */
KVT_API int64_t kvt_state_values(const kvt_recurrent* recurrent);

/* ---- the model --------------------------------------------------------------------------- */

/* A vector, matrix, rope, attention, state or recurrent layer is named by its index in the model's
 * table; -1: none. */

enum { KVT_ROPE_NORM = 0, KVT_ROPE_NEOX = 1 }; /* pairs (2i, 2i + 1); (i, i + num_rotated / 2) */

typedef struct { /* a kind of rope: angle = p * scale * base^(-2i / num_rotated) / factors[i] */
  double base, scale;
  double magnitude;     /* multiplies cos and sin */
  int32_t style;
  int32_t num_rotated;  /* even, at most head_dim: the first values of a head */
  int32_t factors;      /* vector [num_rotated / 2] or -1 */
  int32_t reserved;     /* 0 */
} kvt_rope;

typedef struct { /* attention of one layer */
  int32_t cache;        /* index of the layer's kvt_cache */
  int32_t rope;         /* or -1 */
  int32_t num_heads;    /* a multiple of the cache's kv_heads */
  int32_t window;       /* positions seen, the query's own included; 0: all */
  float scale;          /* of q k^T */
  float softcap;        /* 0: none */
  int32_t sinks;        /* vector [num_heads] or -1 */
  int32_t is_gated;     /* 1: q's matrix yields q and gate, head by head; the output is multiplied
                           by sigmoid(gate); value_dim is head_dim */
  int32_t has_joint_norms; /* 1: head norms are of all heads together, [heads * head_dim] */
  int32_t temperature_length; /* 0: none; else q at position p, rotated, is multiplied by */
  float temperature;    /* 1 + temperature * ln(1 + floor(p / temperature_length)) */
} kvt_attention;

typedef struct {
  const kvt_matrix* matrices;
  const kvt_vector* vectors;
  const kvt_cache* caches;
  const kvt_rope* ropes;
  const kvt_attention* attentions;
  const kvt_op* program;
  const kvt_state* states;
  const kvt_recurrent* recurrents;
  int32_t num_matrices, num_vectors, num_caches, num_ropes, num_attentions, num_ops;
  int32_t num_states, num_recurrents;
  int32_t num_groups;    /* block tables per chunk */
  int32_t hidden_size;
  int32_t vocab_size;    /* rows of EMBED's and LOGITS' matrices */
  int32_t max_sampled;   /* most M of a step */
  int64_t max_rows;      /* most N of a step */
  int64_t max_context;   /* positions of a request */
} kvt_model_desc;

typedef struct kvt_model kvt_model;

/* Checks everything in the description against everything else; copies the tables. Activations
 * are allocated for max_rows rows, but take RAM only as far as steps use them. */
KVT_API int32_t kvt_model_new(kvt_team* team, const kvt_model_desc* desc, kvt_model** model);
KVT_API void kvt_model_free(kvt_model* model); /* null: nothing; its adapters are freed first */
/* float32 [max_sampled, V]: the first M rows are the last step's logits. */
KVT_API const float* kvt_model_logits(const kvt_model* model);
/* Bytes of activations that a step with all rows would touch. */
KVT_API int64_t kvt_model_buffer_bytes(const kvt_model* model);

#ifdef __cplusplus
}
#endif

#endif /* KVT_H */
