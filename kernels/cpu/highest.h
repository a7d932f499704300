#ifndef HIGHEST_H
#define HIGHEST_H

#include "element.h"

/* The highest of `count` logits; -inf if none is a number. */
static float highest_of(const element *logits, int64_t count) {
    enum { VECTORS = 4 };
    vector highest[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        highest[v] = spread(-INFINITY);
    int64_t i = 0;
    for (; i + VECTORS * LANES <= count; i += VECTORS * LANES)
        for (int v = 0; v < VECTORS; v++)
            highest[v] = larger_of(load(logits + i + v * LANES), highest[v]);
    for (int v = 1; v < VECTORS; v++)
        highest[0] = larger_of(highest[v], highest[0]);
    float result = largest_of(highest[0]);
    for (; i < count; i++)
        result = to_float(logits[i]) > result ? to_float(logits[i]) : result;
    return result;
}

#endif
