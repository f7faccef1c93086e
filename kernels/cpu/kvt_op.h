/* Operations of a model's program: the C interface of the CPU kernels, continued. Rules as in kvt.h.
 *
 * A vector, matrix, attention or recurrent layer is named by its index in the model's table; -1:
 * none.
 */
#ifndef KVT_OP_H
#define KVT_OP_H

#include <stdint.h>

enum { KVT_SILU = 1, KVT_GELU_TANH = 2, /* 0: none */
       KVT_CLAMPED = 3 }; /* not act(gate) * up, but gate sigmoid(1.702 gate) * (up + 1), gate at
                             most 7 and up within 7 of 0 */

enum { /* activations, float32 */
  KVT_RESIDUAL = 0,  /* [N, hidden]: the residual stream */
  KVT_QUERY = 1,     /* [N, heads * head_dim]: q, rotated */
  KVT_ATTENDED = 2,  /* [N, heads * value_dim]: of attention or a recurrent layer; q on its way */
  KVT_HIDDEN = 3,    /* [N, feed-forward size]: act(gate) * up; q on its way */
  KVT_BRANCH = 4     /* [N, hidden]: a branch that is added by an op of its own */
};

/* What an op does; fields that are not named are -1 (indices) or 0.
 *
 * Where `norm` is a vector, the input enters as input / sqrt(mean(input^2) + eps) * norm; with
 * is_centred less its mean before, and plus norm_bias (if any) behind.
 * Products add their bias (if any), then the changes of the step's adapters to that matrix.
 */
enum {
  KVT_OP_EMBED = 0,     /* RESIDUAL = rows of matrices[0] for the tokens, times scale */
  KVT_OP_QKV = 1,       /* input RESIDUAL; q, k, v = products with matrices[0..2] and biases[0..2];
                           q and k through head_norms[0..1] with eps (per head; -1: not), then
                           through the rope of `attention`; k, v into its cache; q to QUERY */
  KVT_OP_ATTENTION = 2, /* ATTENDED = attention of QUERY by `attention` */
  KVT_OP_LINEAR = 3,    /* output (RESIDUAL: added to it; BRANCH, HIDDEN, ATTENDED: set) from another
                           buffer, input, by matrices[0] */
  KVT_OP_GATED = 4,     /* HIDDEN = act(input matrices[0]^T) * (input matrices[1]^T): gate, up */
  KVT_OP_ADD = 5,       /* RESIDUAL += scale * BRANCH, or of its norm (post-norm), eps */
  KVT_OP_SAMPLED = 6,   /* from here on the rows are the M sampled ones (RESIDUAL, and what QKV or
                           RECURRENT has just written, are narrowed); before LOGITS, or earlier:
                           right behind the last op that writes a state, the last layer computes
                           nothing that nobody reads */
  KVT_OP_LOGITS = 7,    /* the logits: RESIDUAL by matrices[0], then softcap * tanh(x / softcap) if
                           softcap > 0, then times scale */
  KVT_OP_SAMPLE = 8,    /* the results that the step asks for, from the logits */
  KVT_OP_RECURRENT = 9, /* ATTENDED = the layer `recurrent` on the products of RESIDUAL with
                           matrices, one behind the other: short convolution b, c, x; delta net q, k, v (one
                           matrix), z, and the gates in one matrix or two; state space z, x, B, C and
                           dt in one; eps of its norms */
  KVT_OP_EXPERTS = 10,  /* BRANCH = the sum over the num_used experts that `routing` chooses by the
                           products with matrices[0] (the router) of weight * (act(gate) * up)
                           matrices[3]^T, gate and up from RESIDUAL by matrices[1] and [2]: stacks, a
                           matrix per expert; biases as matrices.
                           With is_shared, plus what BRANCH held before, which counts
                           sigmoid(shared_gate . input) times if shared_gate is a vector */
  KVT_OP_PLAIN = 11,    /* HIDDEN = act(input matrices[0]^T) */
  KVT_OP_LATENT = 12,   /* a row [head_dim] of the product of RESIDUAL with matrices[0]: its first
                           value_dim numbers through head_norms[0] with eps, the others through the
                           rope; into the cache, which is_latent. ATTENDED holds q [heads, plain +
                           rotated]: its plain numbers by the head's matrix of the stack matrices[1],
                           [value_dim, plain], the others through the rope; to QUERY */
  KVT_OP_HEADS = 13     /* HIDDEN = per head, ATTENDED by its matrix of the stack matrices[0] */
};

enum { /* what makes an expert's score of its product with the router */
  KVT_SCORE_CHOSEN = 0,  /* the product; the weights are the softmax over those chosen */
  KVT_SCORE_SOFTMAX = 1, /* the softmax over all */
  KVT_SCORE_SIGMOID = 2
};

typedef struct { /* experts with the largest scores are used; of equal ones the first */
  int32_t scoring;
  int32_t is_normalised;   /* weights are scores, divided by the sum of those chosen if 1, */
  float scale;             /* and multiplied by this; CHOSEN reads neither, nor what follows */
  int32_t bias;            /* vector [experts] or -1: added to scores for the choice alone */
  int32_t num_groups;      /* of experts, in order; 1, or a group has two experts at least */
  int32_t num_groups_used; /* those with the largest sums of their two best */
} kvt_routing;

typedef struct {
  int32_t kind;
  int32_t input;         /* buffer: LINEAR */
  int32_t output;        /* buffer: LINEAR */
  int32_t norm;          /* vector: QKV, LINEAR, GATED, ADD, LOGITS, RECURRENT, EXPERTS, PLAIN,
                            LATENT */
  int32_t norm_bias;     /* vector */
  int32_t is_centred;    /* 0 or 1; not of ADD */
  float eps;             /* of norm, head_norms, and norms of a recurrent layer */
  int32_t matrices[4];
  int32_t biases[4];     /* vectors */
  int32_t head_norms[2]; /* vectors [head_dim], or as has_joint_norms says */
  int32_t attention;     /* index: QKV, ATTENTION, LATENT, HEADS */
  int32_t activation;    /* GATED, EXPERTS, PLAIN */
  float scale;           /* EMBED, ADD, LOGITS */
  float softcap;         /* LOGITS */
  int32_t recurrent;     /* index: RECURRENT */
  int32_t num_used;      /* EXPERTS */
  int32_t is_shared;     /* EXPERTS: 0 or 1 */
  int32_t shared_gate;   /* EXPERTS: vector [hidden] or -1 */
  kvt_routing routing;   /* EXPERTS */
} kvt_op;

#endif /* KVT_OP_H */
