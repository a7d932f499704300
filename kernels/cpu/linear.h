/* y = x @ w^T + bias, and what is done with the sums before they are rounded. */

#ifndef LINEAR_H
#define LINEAR_H

#include "lora.h"
#include "team.h"

typedef enum { ELEMENTS, INT8, INT4 } Format; /* the latter two: quantized.h */

/* A weight as kernels/linear.py packs it: panels of PANEL outputs, each a step of inputs after the other for all of
 * its outputs. What lies beyond the layer's own sizes is zero. */
typedef struct {
    const char *panels;
    const float *bias; /* padded to whole panels, or NULL */
    int64_t inputs, outputs;
    Format format;
    const float *scales; /* of INT8: padded to whole panels */
    Adapters adapters;   /* or NULL; looked at where a product has a batch of them */
} Weight;

typedef enum { IDENTITY, SILU, GELU_TANH, GELU, RELU } Activation;

typedef struct {
    const Weight *weight;
    const Weight *gate; /* or NULL; as large as `weight` */
    const element *x;   /* [rows, inputs] */
    element *y;         /* [rows, outputs]: act(gate) · sums, or sums + residual */
    const element *residual; /* [rows, outputs], may be `y` itself; or NULL */
    int64_t rows;
    Activation activation;
    const LoraBatch *lora; /* or NULL: the rows' adapters */
} Product;

/* A phase of its own. */
void multiply(Worker *w, const Product *p);

#endif
