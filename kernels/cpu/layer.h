/* A decoder layer of the common kind: attention and a gated MLP, each between norms and added to what came before.
 *
 *     h = x + after_attention(output(attend(rotate(qkv(before_attention(x))))))
 *     y = h + after_mlp(down(activation(gate(before_mlp(h))) · up(before_mlp(h))))
 */

#ifndef LAYER_H
#define LAYER_H

#include "attention.h"
#include "linear.h"
#include "rows.h"

typedef struct {
    Norm before_attention, of_queries, of_keys, after_attention, before_mlp, after_mlp;
    Weight qkv, output, gate, up, down;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    Activation activation;
    Attention attention; /* its batch, queries and output are the step's */
    int64_t kind;        /* which of the step's batches and slots are for it */
} Layer;

/* A step's tokens; from `normed` on, memory for what the parts of a layer leave to each other. */
typedef struct {
    int64_t num_tokens;
    const AttentionBatch *const *batches;
    const int64_t *const *slots;  /* [tokens] each, where keys and values go in the caches; -1 is nowhere */
    const float *cosines, *sines; /* [tokens, rotary_dim] */
    element *normed;                /* [tokens, hidden size] */
    element *qkv;                   /* [tokens, heads + 2 · KV heads, head_dim] */
    element *attended;              /* [tokens, heads, head_dim] */
    element *gated;                 /* [tokens, intermediate size] */
    const LoraBatch *lora;          /* or NULL: nobody has an adapter */
} LayerStep;

#endif
