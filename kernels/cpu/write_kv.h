/* Keys or values of tokens into the cache, which is what attention reads. */

#ifndef WRITE_KV_H
#define WRITE_KV_H

#include "attention.h"

/* One token's: `heads` of `dim` elements, `stride` apart. */
INLINE void write_slot(const Cache *c, CacheType type, int64_t slot, const element *heads, int64_t stride,
                       int64_t num_kv_heads, int64_t dim) {
    for (int64_t head = 0; head < num_kv_heads; head++) {
        const element *x = heads + head * stride;
        char *to = slot_of(c, type, slot, head);
        if (type == PLAIN)
            memcpy(to, x, dim * sizeof(element));
        else
            encode_row(type, (uint8_t *)to, c->scales + slot * num_kv_heads + head, x, dim);
    }
}

#endif
