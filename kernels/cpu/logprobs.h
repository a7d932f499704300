/* Log-probabilities of a token of each row, and of the likeliest ones: kernels/token_logprobs.py says what they are. */

#ifndef LOGPROBS_H
#define LOGPROBS_H

#include "team.h"

enum { MAX_TOP = 64 };

typedef struct {
    const element *logits; /* [rows, vocab_size], `stride` elements from row to row */
    int64_t stride, rows, vocab_size;
    const int64_t *token_ids; /* [rows] */
    float *logprobs;          /* [rows] */
    int64_t *ranks;           /* [rows] */
    int64_t num_top;          /* at most MAX_TOP and `vocab_size` */
    int64_t *top_ids;         /* [rows, num_top], as is `top_logprobs` */
    float *top_logprobs;
} Logprobs;

/* For Python, which calls it. */
EXPORT void token_logprobs(const Logprobs *l, int num_threads);

#endif
