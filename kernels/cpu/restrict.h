/* What min-p, top-k and top-p leave of a row: kernels/restrict.py says what that is. */

#ifndef RESTRICT_H
#define RESTRICT_H

#include "team.h"

enum { BUCKETS = 1 << 16 };

/* For counting a row's logits by value: one for each thread. All zero, before and after. */
typedef struct {
    uint32_t counts[BUCKETS];
#if !ELEMENT_BF16
    double weights[BUCKETS];
    uint32_t counts_within[BUCKETS];
#endif
} Tables;

typedef struct {
    const element *logits;
    int64_t vocab_size;
    float highest, temperature;
} Row;

/* The logits above `threshold`, and those equal to it with ids up to `last_equal`. */
typedef struct {
    float threshold;
    int64_t last_equal;
} Kept;

/* 0, 1 and 0 are off. */
typedef struct {
    int64_t top_k;
    double top_p, min_p;
} Restriction;

/* A logit as temperature has it: nothing is above 0, and a tiny temperature makes -inf, never NaN. */
INLINE float scaled(const Row *row, float logit) { return (logit - row->highest) / row->temperature; }

Kept restrict_row(const Row *row, Restriction restriction, Tables *tables);

typedef struct {
    const element *logits; /* [rows, vocab_size], `stride` elements from row to row */
    int64_t stride, rows, vocab_size;
    /* All [rows]. */
    const float *highest, *temperature;
    const int64_t *top_k;
    const double *top_p, *min_p;
    float *threshold;
    int64_t *last_equal;
    Tables *tables; /* [threads] */
} Restricting;

/* For Python, which calls these: */
EXPORT int tables_bytes(void);
EXPORT void restrict_rows(const Restricting *r, int num_threads);

#endif
