/* Activations of gated layers, as the model's own code defines them. */

#ifndef ACTIVATION_H
#define ACTIVATION_H

#include "linear.h"

INLINE vector silu(vector x) { return x / (1.0f + exponential(-x)); }

/* 0.5 · x · (1 + tanh(y)) = x · sigmoid(2y) */
INLINE vector gelu_tanh(vector x) {
    const vector y = 1.59576912f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-y));
}

INLINE vector gelu(vector x) {
    vector y;
    for (int i = 0; i < LANES; i++)
        y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}

INLINE vector activate(Activation kind, vector x) {
    switch (kind) {
    case SILU:
        return silu(x);
    case GELU_TANH:
        return gelu_tanh(x);
    case GELU:
        return gelu(x);
    case RELU:
        return choose(x < 0.0f, (vector){}, x); /* which leaves what is not a number */
    default:
        return x;
    }
}

#endif
