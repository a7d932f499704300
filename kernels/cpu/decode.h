/* Codes of a cache as elements, rows one behind the other, while others are fetched. */

#ifndef DECODE_H
#define DECODE_H

#include "cache_rows.h"
#include "codes.h"

enum { FETCHED_AFTER_ROWS = 8 };

INLINE void decode_rows_of(const CacheType type, element *rows, const Slots *codes, int64_t begin, int64_t end,
                           int64_t dim, const Wanted *wanted) {
    for (int64_t i = begin; i < end; begin = i) {
        for (; i < end && i < begin + FETCHED_AFTER_ROWS; i++, rows += dim)
            decode_row(rows, type, row_of(codes, i), dim);
        fetch_rows(wanted, begin, i);
    }
}

/* `rows` [end - begin, dim] from some of the codes. */
static inline void decode_rows(CacheType type, element *rows, const Slots *codes, int64_t begin, int64_t end, int64_t dim,
                        const Wanted *wanted) {
    if (type == INT8_CODES)
        decode_rows_of(INT8_CODES, rows, codes, begin, end, dim, wanted);
    else
        decode_rows_of(FP8_CODES, rows, codes, begin, end, dim, wanted);
}

#endif
