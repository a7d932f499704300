/* Without sorting the vocabulary: logits are counted by value, and the values that occur are gone through from the
 * highest down, until their counts or weights have reached what is asked for. For bfloat16 that is one pass over the
 * row. float32 has too many values: they are counted by the upper half of their bits, with their weights, and then those
 * of the one bucket in which the end lies by the other half.
 *
 * Counts are exact. Weights are float64, of logits scaled in float32, as the reference has them; their sums depend on
 * the row alone, and are the reference's but for the order of adding.
 */

#include "restrict.h"

enum { BLOCK = 512, RUNS = 256, SKIPPED_AT_ONCE = 16 };

typedef double doubles __attribute__((vector_size(4 * LANES)));
typedef int64_t double_bits __attribute__((vector_size(4 * LANES)));
typedef float half_vector __attribute__((vector_size(2 * LANES)));

/* Ascends as values descend; its upper half names the bucket. */
INLINE uint32_t place_of(float x) {
    const float canonical = x + 0.0f; /* 0 of -0: they are equals */
    uint32_t bits;
    memcpy(&bits, &canonical, sizeof bits);
    return bits >> 31 ? bits : bits ^ 0x7fffffff;
}

INLINE float value_at(uint32_t place) {
    const uint32_t bits = place >> 31 ? place : place ^ 0x7fffffff;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e^x of x <= 0, within two units in the last place; 0 where that is no normal number. */
INLINE doubles exponential_of(doubles x) {
    const doubles shift = (doubles){} + 0x1.8p52; /* behind it only whole numbers remain, in the lowest bits */
    const double_bits is_normal = x > -708.0;
    x = (doubles)(is_normal & (double_bits)x);
    const doubles shifted = x * 0x1.71547652b82fep0 + shift, whole = shifted - shift;
    const doubles rest = (x - whole * 0x1.62e42fefa0000p-1) - whole * 0x1.cf79abc9e3b3ap-40;
    static const double factorials[] = {6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040,
                                        720,        120,       24,       6,       2,      1,     1};
    doubles y = {};
#pragma GCC unroll 14
    for (int i = 0; i < 14; i++)
        y = y * rest + 1 / factorials[i];
    y *= (doubles)(((double_bits)shifted + 1023) << 52);
    return (doubles)(is_normal & (double_bits)y);
}

/* The weights of `count` logits; up to the next multiple of LANES there is room. */
static void weigh(double *weights, const float *logits, int64_t count, const Row *row) {
    for (int64_t i = 0; i < count; i += LANES / 2) {
        half_vector x;
        memcpy(&x, logits + i, sizeof x);
        x = (x - row->highest) / row->temperature;
        const doubles y = exponential_of(__builtin_convertvector(x, doubles));
        memcpy(weights + i, &y, sizeof y);
    }
}

/* Places in a table, those of [first, end). */
typedef struct {
    uint32_t first, end;
} Range;

/* Count the logits that are at least `lowest` by bucket, within `range`. */
static void count_buckets(Tables *tables, const Row *row, float lowest, Range range, int weighs) {
    float values[BLOCK] = {0};
    uint16_t places[BLOCK];
    for (int64_t begin = 0; begin < row->vocab_size; begin += BLOCK) {
        const int64_t count = row->vocab_size - begin < BLOCK ? row->vocab_size - begin : BLOCK;
        for (int64_t i = 0; i < count; i++)
            values[i] = to_float(row->logits[begin + i]);
        for (int64_t i = 0; i < BLOCK; i++)
            places[i] = values[i] >= lowest ? place_of(values[i]) >> 16 : BUCKETS - 1;
#if ELEMENT_BF16
        (void)weighs;
        for (int64_t i = 0; i < count; i++)
            if (places[i] - range.first < range.end - range.first)
                tables->counts[places[i]]++;
#else
        double weights[BLOCK];
        if (weighs)
            weigh(weights, values, count, row);
        for (int64_t i = 0; i < count; i++)
            if (places[i] - range.first < range.end - range.first) {
                tables->counts[places[i]]++;
                if (weighs)
                    tables->weights[places[i]] += weights[i];
            }
#endif
    }
}

static void clear(Tables *tables, Range range) {
    memset(tables->counts + range.first, 0, (range.end - range.first) * sizeof *tables->counts);
#if !ELEMENT_BF16
    memset(tables->weights + range.first, 0, (range.end - range.first) * sizeof *tables->weights);
#endif
}

/* On the way through a table, from the highest value down. */
typedef struct {
    const Row *row;
    const uint32_t *counts;
    const double *weights; /* or NULL: those at a place are equals */
    uint32_t bucket;       /* of the places, if they are lower halves */
    Range rest;
} Walk;

/* What is at a place, for some places. */
typedef struct {
    int64_t size;
    uint32_t places[RUNS];
    float values[RUNS]; /* where they are equals */
    double counts[RUNS], weights[RUNS];
} Runs;

INLINE float value_of(const Walk *walk, uint32_t place) {
#if ELEMENT_BF16
    (void)walk;
    return to_float(place >> 15 ? place : place ^ 0x7fff);
#else
    return value_at(walk->bucket << 16 | place);
#endif
}

/* Some runs more; none if there are no more. */
static int64_t next_runs(Runs *runs, Walk *walk, int weighs) {
    int64_t n = 0;
    while (walk->rest.first < walk->rest.end && n <= RUNS - SKIPPED_AT_ONCE) {
        const uint32_t first = walk->rest.first & -SKIPPED_AT_ONCE;
        uint32_t any = 0;
        for (int i = 0; i < SKIPPED_AT_ONCE; i++)
            any |= walk->counts[first + i];
        for (uint32_t place = walk->rest.first; any && place < first + SKIPPED_AT_ONCE && place < walk->rest.end; place++)
            if (walk->counts[place]) {
                runs->places[n] = place;
                runs->values[n] = value_of(walk, place);
                runs->counts[n] = walk->counts[place];
                n++;
            }
        walk->rest.first = first + SKIPPED_AT_ONCE;
    }
    if (weighs && walk->weights)
        for (int64_t i = 0; i < n; i++)
            runs->weights[i] = walk->weights[runs->places[i]];
    else if (weighs) {
        weigh(runs->weights, runs->values, n, walk->row);
        for (int64_t i = 0; i < n; i++)
            runs->weights[i] *= runs->counts[i];
    }
    return runs->size = n;
}

/* For where in the sorted row counts, or weights, reach a target. */
typedef struct {
    int by_weight, weighs;
    double target;
    /* Of what comes before the last run, and of that: the one that reaches the target, or the last of all. */
    double count, weight, run_count, run_weight;
    uint32_t place;
    float value;
} Search;

/* Whether the target is reached on this way. */
static int search(Search *s, Walk walk) {
    Runs runs;
    while (next_runs(&runs, &walk, s->weighs))
        for (int64_t i = 0; i < runs.size; i++) {
            s->count += s->run_count;
            s->weight += s->run_weight;
            s->run_count = runs.counts[i];
            s->run_weight = s->weighs ? runs.weights[i] : 0;
            s->place = runs.places[i];
            s->value = runs.values[i];
            if ((s->by_weight ? s->weight + s->run_weight : s->count + s->run_count) >= s->target)
                return 1;
        }
    return 0;
}

#if !ELEMENT_BF16

/* The same among the values of the bucket where it was reached. */
static void search_bucket(Search *s, const Row *row, float lowest, Tables *tables) {
    const uint32_t bucket = s->place;
    const vector least = spread(fmaxf(value_at(bucket << 16 | 0xffff), lowest)), most = spread(value_at(bucket << 16));
    for (int64_t begin = 0; begin < row->vocab_size; begin += LANES) {
        const vector x = load_some(row->logits + begin, row->vocab_size - begin);
        for (uint32_t inside = lanes_of((x >= least) & (x <= most)); inside; inside &= inside - 1) {
            const int64_t token = begin + __builtin_ctz(inside);
            /* Neither what is beyond the end, nor 0 among values that are rounded to -0. */
            if (token < row->vocab_size && place_of(row->logits[token]) >> 16 == bucket)
                tables->counts_within[place_of(row->logits[token]) & 0xffff]++;
        }
    }
    s->run_count = s->run_weight = 0;
    search(s, (Walk){row, tables->counts_within, NULL, bucket, {0, BUCKETS}});
    memset(tables->counts_within, 0, sizeof tables->counts_within);
}

#endif

/* From the highest bucket of `range` on. */
static int search_row(Search *s, const Row *row, float lowest, Tables *tables, Range range) {
#if ELEMENT_BF16
    (void)lowest;
    return search(s, (Walk){row, tables->counts, NULL, 0, range});
#else
    const int found = search(s, (Walk){row, tables->counts, tables->weights, 0, range});
    if (found)
        search_bucket(s, row, lowest, tables);
    return found;
#endif
}

/* How many of the last run belong to the head that was searched for. */
static double let_in(const Search *s) {
    const double before = s->by_weight ? s->weight : s->count;
    const double each = s->by_weight ? s->run_weight / s->run_count : 1;
    return fmin(fmax(ceil((s->target - before) / each), 1), s->run_count);
}

static int64_t id_of_equal(const Row *row, float value, int64_t number) {
    for (int64_t begin = 0; begin < row->vocab_size; begin += LANES) {
        uint32_t equal = lanes_of(load_some(row->logits + begin, row->vocab_size - begin) == value);
        for (; equal; equal &= equal - 1)
            if (--number == 0)
                return begin + __builtin_ctz(equal);
    }
    return row->vocab_size;
}

static Kept head(const Search *s, const Row *row) {
    const double number = let_in(s);
    return (Kept){s->value, number < s->run_count ? id_of_equal(row, s->value, (int64_t)number) : row->vocab_size};
}

/* The lowest float32 that min-p keeps. */
static float lowest_likely(const Row *row, double min_p) {
    const float least = (float)log(min_p);
    uint32_t likely = place_of(row->highest), unlikely = place_of(-INFINITY);
    while (unlikely - likely > 1) {
        const uint32_t middle = likely + (unlikely - likely) / 2;
        if (scaled(row, value_at(middle)) >= least)
            likely = middle;
        else
            unlikely = middle;
    }
    return value_at(likely);
}

Kept restrict_row(const Row *row, Restriction restriction, Tables *tables) {
    const float lowest = restriction.min_p > 0 ? lowest_likely(row, restriction.min_p) : -INFINITY;
    Kept kept = {lowest, row->vocab_size};
    const int has_top_k = restriction.top_k > 0 && restriction.top_k < row->vocab_size;
    const int weighs = restriction.top_p < 1;
    if (!has_top_k && !weighs)
        return kept;

    /* Those of infinities are not gone through. */
    const uint32_t end = place_of(lowest) >> 16, end_of_finite = place_of(-INFINITY) >> 16;
    const Range range = {place_of(row->highest) >> 16, end < end_of_finite ? end + 1 : end_of_finite};
    if (range.first >= range.end)
        return kept;
    count_buckets(tables, row, lowest, range, weighs);
    Search likeliest = {.weighs = weighs, .target = has_top_k ? (double)restriction.top_k : INFINITY};
    if (search_row(&likeliest, row, lowest, tables, range))
        kept = head(&likeliest, row);
    if (weighs) {
        const double whole = likeliest.weight + likeliest.run_weight / likeliest.run_count * let_in(&likeliest);
        Search nucleus = {.by_weight = 1, .weighs = 1, .target = restriction.top_p * whole};
        if (search_row(&nucleus, row, lowest, tables, range)) {
            const Kept smaller = head(&nucleus, row);
            if (smaller.threshold > kept.threshold ||
                (smaller.threshold == kept.threshold && smaller.last_equal < kept.last_equal))
                kept = smaller;
        }
    }
    clear(tables, range);
    return kept;
}

static void restrict_in_team(Worker *w, const Restricting *r) {
    Tasks tasks = tasks_of(w, r->rows);
    for (int64_t row; (row = next_task(&tasks)) >= 0;) {
        Kept kept = {-INFINITY, r->vocab_size};
        if (r->temperature[row] > 0)
            kept = restrict_row(
                &(Row){r->logits + row * r->stride, r->vocab_size, r->highest[row], r->temperature[row]},
                (Restriction){r->top_k[row], r->top_p[row], r->min_p[row]}, r->tables + w->rank);
        r->threshold[row] = kept.threshold;
        r->last_equal[row] = kept.last_equal;
    }
}

int tables_bytes(void) { return sizeof(Tables); }

void restrict_rows(const Restricting *r, int num_threads) {
    WITH_TEAM(num_threads, worker, restrict_in_team(&worker, r));
}
