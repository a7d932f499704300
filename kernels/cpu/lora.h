/* What adapters add to matrix products: y += B · (scaling · A · x), to each row what its own adapter makes of it. */

#ifndef LORA_H
#define LORA_H

#include "team.h"

enum { RANK_PANEL = 16 };

/* B of some outputs, as a weight's panels whose inputs are the slice's share of what a row is shrunk to. Zero where a
 * panel has outputs of others. */
typedef struct {
    const char *panels;
    int64_t first_panel, end_panel; /* of the whole product's */
    int64_t first_rank, rank;
} LoraSlice;

/* An adapter for one product. */
typedef struct {
    const char *rank_panels; /* A of all slices: panels of RANK_PANEL outputs, filled up with zeros */
    const float *scaling;    /* for each of their outputs */
    int64_t num_rank_panels;
    const LoraSlice *slices;
    int64_t num_slices;
} Lora;

/* Of a linear layer, by slot; NULL where the adapter in it leaves the layer alone. */
typedef const Lora *const *Adapters;

/* Whose rows of a step are whose. */
typedef struct {
    const int32_t *slots; /* [rows]; -1 without an adapter */
    const int32_t *rows;  /* those with one, sorted by it */
    const int32_t *tiles; /* [tiles, 3]: slot, first place in `rows`, how many */
    int64_t num_tiles;
    element *shrunk; /* [rows, shrunk_stride]: room for scaling · A · x */
    int64_t shrunk_stride;
} LoraBatch;

/* `x` [rows, inputs] shrunk for the next product. `more`, or NULL, is for another one of the same `x`; what it makes
 * lies behind. A phase of its own where any adapter of the batch has a part in it. */
void shrink(Worker *w, const LoraBatch *b, Adapters adapters, Adapters more, const element *x, int64_t x_stride,
            int64_t inputs);

/* Have what `expand` will read for these in the second-level cache. */
void fetch_expansion(const LoraBatch *b, Adapters adapters, int64_t panel, int64_t row, int64_t rows);

/* To `sums` [rows, PANEL] of a panel, of the rows from `row` on. `before`, or NULL, are those whose shrunk rows lie
 * before these adapters'. */
void expand(float *sums, const LoraBatch *b, Adapters adapters, Adapters before, int64_t panel, int64_t row,
            int64_t rows);

#endif
