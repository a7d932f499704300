/* A token for each row of logits: kernels/sample_tokens.py says which. */

#ifndef SAMPLING_H
#define SAMPLING_H

#include "restrict.h"

typedef struct {
    const element *logits; /* [rows, vocab_size], `stride` elements from row to row */
    int64_t stride, rows, vocab_size;
    int64_t *tokens; /* [rows] */
    /* All [rows], or NULL where every row is greedy. */
    const float *temperature;
    const int64_t *seeds, *positions;
    /* All [rows], or NULL where no row has any. */
    const int64_t *top_k;
    const double *top_p, *min_p;
    Tables *tables;  /* [threads] */
    char *workspace; /* [workspace_bytes] */
} Sampling;

/* For Python, which calls these: */
EXPORT int workspace_bytes(const Sampling *s);
EXPORT void sample(const Sampling *s, int num_threads);

#endif
