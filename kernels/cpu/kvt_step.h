/* Adapters and steps of a model: the C interface of the CPU kernels, continued. Rules as in kvt.h. */
#ifndef KVT_STEP_H
#define KVT_STEP_H

#include "kvt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- adapters ---------------------------------------------------------------------------- */

typedef struct {       /* change of one matrix: out += ((x A^T) * scaling * use scale) B^T */
  const float* a;      /* [rank, cols of the matrix], contiguous */
  const float* b;      /* [rows of the matrix, rank] */
  int32_t matrix;      /* index; where EMBED and LOGITS share one, LOGITS alone is changed */
  int32_t rank;        /* 1 or more */
  float scaling;
  int32_t reserved;    /* 0 */
} kvt_low_rank;

typedef struct kvt_adapter kvt_adapter;

/* Copies a and b. At most one part per matrix. */
KVT_API int32_t kvt_adapter_new(kvt_model* model, const kvt_low_rank* parts, int32_t num_parts,
                                kvt_adapter** adapter);
KVT_API void kvt_adapter_free(kvt_adapter* adapter); /* null: nothing; no step names it any more */
KVT_API int64_t kvt_adapter_bytes(const kvt_adapter* adapter);

/* ---- a step ------------------------------------------------------------------------------ */

typedef struct { /* one request's rows: positions start, start + 1, ... */
  int64_t start;
  int32_t num_rows;   /* 1 or more; chunks cover the N rows in order */
  int32_t is_sampled; /* 1: its last row is sampled; these are the M rows, in order */
} kvt_chunk;

typedef struct { /* first places of a block, or a state, in all layers of a group; done before all
                    else, in order */
  int32_t group;
  int32_t source, target; /* blocks or slots */
  int32_t num_tokens;     /* 1 to block_size; of a state not looked at */
} kvt_copy;

typedef struct { /* chunks that use an adapter */
  int32_t first_chunk;
  int32_t num_chunks;
} kvt_segment;

typedef struct { /* one adapter at one scale; uses are in the canonical order of their changes */
  const kvt_adapter* adapter; /* made for this model */
  float scale;
  int32_t first_segment;      /* its segments: ascending, disjoint */
  int32_t num_segments;
  int32_t reserved;           /* 0 */
} kvt_use;

enum { /* what is wanted of a sampled row besides its best token */
  KVT_WANT_LOG_SUM = 1 /* log-sum-exp of its logits */
};

typedef struct {
  int32_t num_top;  /* number of best tokens wanted; 0: none */
  int32_t wants;    /* KVT_WANT_ bits */
} kvt_sample;

enum { /* columns of a profile, nanoseconds of worker 0 */
  KVT_PROFILE_PREPARE = 0, /* norm and quantisation of inputs */
  KVT_PROFILE_MAIN = 1,    /* the products, or what the op is */
  KVT_PROFILE_AFTER = 2,   /* q and k on their way to the cache, adapters, activation apart */
  KVT_PROFILE_WAIT = 3,    /* for the other threads at barriers */
  KVT_PROFILE_COLUMNS = 4
};

typedef struct {
  /* in */
  const int32_t* token_ids;      /* [N] */
  const kvt_chunk* chunks;       /* [num_chunks] */
  const int32_t* blocks;         /* all block tables, one behind the other */
  const int64_t* tables;         /* [num_groups * num_chunks + 1]: the table of chunk c in group g
                                    is blocks[tables[i] .. tables[i + 1]), i = g * num_chunks + c;
                                    it covers the positions from 0 to the chunk's last. Only
                                    entries that the window lets some row see are looked at. In
                                    a group of recurrent layers it is the one slot of the request:
                                    the state before `start`, or anything where that is 0, becomes
                                    the one behind the chunk. No two chunks share a slot. */
  const kvt_copy* copies;        /* [num_copies] */
  const kvt_use* uses;           /* [num_uses] */
  const kvt_segment* segments;   /* [num_segments] */
  const kvt_sample* samples;     /* [M] */
  /* out: arrays of the caller; null where nobody asks for it */
  int32_t* best;                 /* [M]: id of the largest logit, the lowest id among equals */
  float* best_logits;            /* [M] */
  double* log_sums;              /* [M]: where KVT_WANT_LOG_SUM is set */
  int32_t* is_finite;            /* [M]: 0: the row has a NaN or an infinity, and its other results
                                    mean nothing */
  int32_t* top_ids;              /* [M, top_stride]: the num_top largest, best first, ties by id */
  float* top_logits;             /* [M, top_stride] */
  int64_t* profile;              /* [num_ops, KVT_PROFILE_COLUMNS]: added to */
  int32_t num_chunks, num_copies, num_uses, num_segments;
  int32_t num_rows;              /* N */
  int32_t num_sampled;           /* M */
  int32_t top_stride;            /* at least every num_top */
  int32_t num_blocks;            /* entries of `blocks` */
} kvt_step;

KVT_API int32_t kvt_step_run(kvt_model* model, const kvt_step* step);

#ifdef __cplusplus
}
#endif

#endif /* KVT_STEP_H */
