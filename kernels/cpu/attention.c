/* The queries of all heads that share a KV head are rows of one matrix. A task takes some of them through its keys, a
 * block at a time: the block is packed into panels, and every group of rows meets it while it is in the nearest caches.
 * Scores, the running maximum, sum and output are float32; weights are rounded to the element type before they meet the
 * values. The idea of the running softmax is FlashAttention's (Dao et al., 2022).
 */

#include "attention.h"

#include <float.h>

#include "decode.h"
#include "few_rows.h"
#include "pack_keys.h"
#include "panel.h"

enum { ALL_HEADS_BYTES = 1 << 16 /* of keys and values of a block, where a task takes several KV heads */ };
static const int64_t MIN_PARALLEL_WORK = 1 << 19; /* products: about what starting the threads takes */
static const float LOG2_E = 1.44269504f;
static const Wanted nothing = {0};

/* What a thread needs for a task. Rows of one KV head lie one behind the other, then those of the next. */
typedef struct {
    _Alignas(64) char keys[BLOCK_BYTES];
    char values[BLOCK_BYTES];
    char queries[QUERY_BYTES];
    float sums[MAX_SUMS]; /* of the values, weighted */
    float scores[FEW_ROWS * MAX_BLOCK_KEYS];
    element weights[FEW_ROWS * MAX_BLOCK_KEYS];
    /* Of codes: the scales of a block's keys and values, 0 behind the last; its elements before they are packed; the
     * places of rows that lie in order. */
    float key_scales[MAX_BLOCK_KEYS], value_scales[MAX_BLOCK_KEYS];
    element decoded[PANEL_KEYS * MAX_HEAD_DIM];
    int64_t in_order[MAX_BLOCK_KEYS];
    Decoding decoding;
    float largest[MAX_ROWS], total[MAX_ROWS]; /* score, in powers of two, and sum of weights */
    int64_t slots[2][MAX_BLOCK_KEYS];         /* of a block's keys and of the next one's */
    /* Of a KV head's rows: whose they are, and which keys they see. */
    int64_t token[MAX_ROWS], first_seen[MAX_ROWS], end_seen[MAX_ROWS];
} Scratch;

INLINE int64_t head_rows(const AttentionTask *t) { return t->tokens * (t->member_end - t->member_begin); }

/* The head of a row of a KV head's. */
INLINE int64_t head_of(const AttentionBatch *b, const AttentionTask *t, int64_t kv_head, int64_t row) {
    return kv_head * (b->num_heads / b->num_kv_heads) + t->member_begin + row % (t->member_end - t->member_begin);
}

INLINE float *part_of(const AttentionBatch *b, int64_t part, int64_t head) {
    return b->parts + (part * b->num_heads + head) * part_floats(b->value_dim);
}

/* Not of NaN: then any. Not a call, before which registers would have to be saved. */
INLINE float largest_float(float x, float y) { return x > y ? x : y; }

/* c · tanh(x / c) */
INLINE vector softened(vector x, float c) {
    const vector y = x / c;
    /* Where a difference of exponentials would be rounded away, a polynomial: (tanh(y) - y) / y^3 for |y| <= 0.6, fitted
     * to a few billionths. */
    const vector square = y * y;
    vector near = spread(-5.8951252e-3f);
    near = near * square + 2.0795941e-2f;
    near = near * square - 5.3783819e-2f;
    near = near * square + 1.3331924e-1f;
    near = near * square - 3.3333299e-1f;
    near = y + y * square * near;
    const vector far = 1.0f - 2.0f / (exponential(y + y) + 1.0f);
    return c * choose(square < 0.36f, near, far);
}

/* Weights of one row from its scores of `num_keys` keys, a multiple of 32, of which it sees those from `first` to
 * `end`. Of codes scores want the keys' scales, and weights are given the values'. The scores are scaled and masked in place: contracted into the subtraction of their maximum, the largest one's
 * scaling would be rounded in another way than the maximum's. Returns the factor that brings earlier sums to the new
 * maximum. */
INLINE float weigh(element *weights, float *scores, const float *key_scales, const float *value_scales,
                   int64_t num_keys, int64_t first, int64_t end, float scaling, float softcap, float *largest,
                   float *total) {
    integers lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    const int32_t from = (int32_t)larger(first, 0), to = (int32_t)end;
    const vector nothing = spread(-INFINITY);
    vector most = nothing;
    for (int32_t key = 0; key < num_keys; key += LANES) {
        vector score = load_floats(scores + key);
        if (key_scales)
            score = score * load_floats(key_scales + key);
        score = softcap > 0 ? softened(score * scaling, softcap) * LOG2_E : score * (scaling * LOG2_E);
        if (key < from || key + LANES > to)
            score = choose((lane + key >= from) & (lane + key < to), score, nothing);
        store_floats(scores + key, score);
        most = larger_of(most, score);
    }
    const float before = *largest, now = largest_float(before, largest_of(most));
    vector sum = {};
    for (int64_t key = 0; key < num_keys; key += LANES) {
        const vector weight = power_of_two(load_floats(scores + key) - now);
        sum = sum + weight;
        store(weights + key, value_scales ? weight * load_floats(value_scales + key) : weight);
    }
    const float factor = power_of_two(spread(before - now))[0];
    *largest = now;
    *total = *total * factor + sum_of(sum);
    return factor;
}

static void score_panel(float *scores, const element *queries, int64_t elements_, const char *panel, int64_t rows) {
    multiply_group(scores, MAX_BLOCK_KEYS, NULL, NULL, queries, elements_, panel, elements_, rows, (Fetching){0});
}

static void add_values(float *sums, int64_t stride, const float *factors, const element *weights, const char *panel,
                       int64_t keys, int64_t rows) {
    multiply_group(sums, stride, factors, NULL, weights, MAX_BLOCK_KEYS, panel, keys, rows, (Fetching){0});
}

/* What rows from `first_row` on, those of one KV head, add up of the keys from `begin` to `end`, which are packed. */
static void meet(const Attention *a, const AttentionTask *t, Scratch *s, int64_t first_row, int64_t begin, int64_t end,
                 int64_t values_panel_bytes) {
    const AttentionBatch *b = a->batch;
    const int64_t query_stride = query_elements(b->head_dim), sums_stride = sum_floats(b->value_dim);
    const int64_t keys_panel_bytes = query_stride / INPUTS_PER_STEP * STEP_BYTES;
    const int64_t num_rows = head_rows(t), groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    const float *key_scales = a->cache.type == PLAIN ? NULL : s->key_scales;
    const float *value_scales = a->cache.type == PLAIN ? NULL : s->value_scales;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = group * num_rows / groups, rows = (group + 1) * num_rows / groups - row;
        int64_t seen_from = end, seen_end = begin;
        for (int64_t r = row; r < row + rows; r++) {
            seen_from = smaller(seen_from, s->first_seen[r]);
            seen_end = larger(seen_end, s->end_seen[r]);
        }
        seen_end = smaller(seen_end, end);
        if (seen_end <= begin || seen_from >= end)
            continue;
        const int64_t num_keys = rounded_up(seen_end - begin, PANEL_KEYS), at = first_row + row;
        const element *queries = (const element *)s->queries + at * query_stride;
        for (int64_t key = 0; key < num_keys; key += PANEL_KEYS)
            score_panel(s->scores + key, queries, query_stride, s->keys + key / PANEL_KEYS * keys_panel_bytes, rows);
        float factors[GROUP_ROWS];
        for (int64_t r = 0; r < rows; r++)
            factors[r] = weigh(s->weights + r * MAX_BLOCK_KEYS, s->scores + r * MAX_BLOCK_KEYS, key_scales,
                               value_scales, num_keys, s->first_seen[row + r] - begin,
                               smaller(end, s->end_seen[row + r]) - begin, a->scaling, a->softcap, &s->largest[at + r],
                               &s->total[at + r]);
        for (int64_t dim = 0; dim < b->value_dim; dim += PANEL)
            add_values(s->sums + at * sums_stride + dim, sums_stride, factors, s->weights,
                       s->values + dim / PANEL * values_panel_bytes, seen_end - begin, rows);
    }
}

/* The same for few rows and a block that is not packed. */
static void meet_unpacked(const Attention *a, const AttentionTask *t, Scratch *s, int64_t first_row, int64_t begin,
                          const Slots *keys, const Slots *values, const Wanted *wanted_keys,
                          const Wanted *wanted_values) {
    const AttentionBatch *b = a->batch;
    const int64_t query_stride = query_elements(b->head_dim), sums_stride = sum_floats(b->value_dim);
    const int64_t rows = head_rows(t), count = keys->count;
    const float *key_scales = a->cache.type == PLAIN ? NULL : s->key_scales;
    const float *value_scales = a->cache.type == PLAIN ? NULL : s->value_scales;
    score_few(s->scores, MAX_BLOCK_KEYS, (const element *)s->queries + first_row * query_stride, query_stride, rows, keys,
              b->head_dim, wanted_keys);
    float factors[FEW_ROWS];
    for (int64_t r = 0; r < rows; r++)
        factors[r] = weigh(s->weights + r * MAX_BLOCK_KEYS, s->scores + r * MAX_BLOCK_KEYS, key_scales, value_scales,
                           rounded_up(count, LANES), s->first_seen[r] - begin,
                           smaller(count, s->end_seen[r] - begin), a->scaling, a->softcap, &s->largest[first_row + r],
                           &s->total[first_row + r]);
    for (int64_t row = 0; row < rows; row += GROUP_ROWS, wanted_values = &nothing)
        add_few(s->sums + (first_row + row) * sums_stride, sums_stride, factors + row, s->weights + row * MAX_BLOCK_KEYS,
                MAX_BLOCK_KEYS, values, b->value_dim, smaller(GROUP_ROWS, rows - row), wanted_values);
}

INLINE int takes_unpacked(const AttentionBatch *b, const AttentionTask *t) {
    return head_rows(t) <= FEW_ROWS && b->head_dim % (LANES * INPUTS_PER_STEP) == 0 && b->value_dim % PANEL == 0;
}

static void begin_rows(const Attention *a, const AttentionTask *t, Scratch *s) {
    const AttentionBatch *b = a->batch;
    const int64_t members = t->member_end - t->member_begin, rows = head_rows(t), stride = query_elements(b->head_dim);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t place = t->first + row / members, token = t->is_listed ? b->listed[place] : place;
        s->token[row] = token;
        s->first_seen[row] = larger(t->key_begin, b->first_seen[token]);
        s->end_seen[row] = smaller(t->key_end, b->end_seen[token]);
    }
    const int64_t all_rows = rows * (t->kv_end - t->kv_begin);
    for (int64_t row = 0; row < all_rows; row++) {
        const int64_t head = head_of(b, t, t->kv_begin + row / rows, row % rows);
        element *to = (element *)s->queries + row * stride;
        to[stride - 1] = 0;
        memcpy(to, a->query + s->token[row % rows] * a->query_token_stride + head * a->query_head_stride,
               b->head_dim * sizeof(element));
        s->largest[row] = -FLT_MAX; /* finite: what it is subtracted from may be minus infinity */
        s->total[row] = 0;
    }
    memset(s->sums, 0, all_rows * sum_floats(b->value_dim) * sizeof(float));
}

static void find_slots(int64_t *slots, const AttentionBatch *b, int64_t request, int64_t begin, int64_t end) {
    const int64_t *block = b->block_tables + request * b->table_stride + begin / b->block_size;
    for (int64_t offset = begin % b->block_size; begin < end; offset = 0, block++) {
        const int64_t count = smaller(end - begin, b->block_size - offset), slot = *block * b->block_size + offset;
        for (int64_t i = 0; i < count; i++)
            *slots++ = slot + i;
        begin += count;
    }
}

/* How many keys make a block. */
static int64_t block_keys(const AttentionBatch *b, const AttentionTask *t) {
    const int64_t kv_heads = t->kv_end - t->kv_begin;
    const int64_t widest = larger(query_elements(b->head_dim), sum_floats(b->value_dim)) * (int64_t)sizeof(element);
    const int64_t all = ALL_HEADS_BYTES / (kv_heads * (b->head_dim + b->value_dim) * (int64_t)sizeof(element));
    const int64_t keys = smaller(MAX_BLOCK_KEYS, smaller(BLOCK_BYTES / widest, kv_heads > 1 ? all : MAX_BLOCK_KEYS));
    return larger(PANEL_KEYS, keys / PANEL_KEYS * PANEL_KEYS);
}

/* Where the keys of a block of a task begin and end. */
typedef struct {
    int64_t begin, end;
} Block;

INLINE Block first_block(const AttentionBatch *b, const AttentionTask *t, int64_t *slots) {
    const Block block = {t->key_begin, smaller(t->key_end, t->key_begin + block_keys(b, t))};
    find_slots(slots, b, t->request, block.begin, block.end);
    return block;
}

/* What one KV head has in some slots. */
INLINE Slots rows_in(const Cache *c, CacheType type, int64_t kv_head, const int64_t *slots, int64_t count) {
    return (Slots){slot_of(c, type, 0, kv_head), c->slot_stride * bytes_of(type), slots, count};
}

/* Of a task's block, a share of all KV heads' rows, for `count` rows that are read meanwhile: a page of memory is better
 * read at once than head by head. */
INLINE Wanted share_of(const Cache *c, CacheType type, int64_t dim, const AttentionTask *t, const int64_t *slots,
                       Block block, int64_t share, int64_t shares, int64_t count) {
    const int64_t all = block.end - block.begin, first = share * all / shares, own = (share + 1) * all / shares - first;
    const int64_t span = (t->kv_end - 1 - t->kv_begin) * c->head_stride + dim;
    return (Wanted){rows_in(c, type, t->kv_begin, slots + first, own), span * bytes_of(type),
                    (own << 16) / rounded_up(count, PANEL_KEYS)};
}

/* Scales of all KV heads are fetched with the first one's: there are few. */
static void find_scales(float *scales, const Cache *c, int64_t num_kv_heads, int64_t kv_head, const int64_t *slots,
                        int64_t count, const int64_t *next_slots, int64_t next_count) {
    for (int64_t i = 0; i < count; i++)
        scales[i] = c->scales[slots[i] * num_kv_heads + kv_head];
    memset(scales + count, 0, (rounded_up(count, PANEL_KEYS) - count) * sizeof *scales);
    for (int64_t i = 0; i < next_count; i++)
        __builtin_prefetch(c->scales + next_slots[i] * num_kv_heads, 0, 2);
}

/* Codes as panels of keys and of values. */
static void pack_codes(const Attention *a, Scratch *s, const Slots *keys, const Slots *values,
                       int64_t values_panel_bytes, const Wanted *wanted_keys, const Wanted *wanted_values) {
    const int64_t head_dim = a->batch->head_dim, value_dim = a->batch->value_dim;
    const int64_t keys_panel_bytes = query_elements(head_dim) / INPUTS_PER_STEP * STEP_BYTES;
    for (int64_t begin = 0; begin < keys->count; begin += PANEL_KEYS) {
        const int64_t end = smaller(keys->count, begin + PANEL_KEYS);
        Slots rows = {(const char *)s->decoded, head_dim * (int64_t)sizeof(element), s->in_order, end - begin};
        decode_rows(&s->decoding, s->decoded, keys, begin, end, head_dim, wanted_keys);
        pack_keys(s->keys + begin / PANEL_KEYS * keys_panel_bytes, &rows, head_dim, &nothing);
        rows.stride = value_dim * (int64_t)sizeof(element);
        decode_rows(&s->decoding, s->decoded, values, begin, end, value_dim, wanted_values);
        pack_values(s->values + begin / INPUTS_PER_STEP * STEP_BYTES, values_panel_bytes, &rows, value_dim, &nothing);
    }
}

/* Codes as rows of elements, where panels would be: keys and values are these from now on. */
static void decode_block(const Attention *a, Scratch *s, Slots *keys, Slots *values, const Wanted *wanted_keys,
                         const Wanted *wanted_values) {
    const int64_t head_dim = a->batch->head_dim, value_dim = a->batch->value_dim, count = keys->count;
    decode_rows(&s->decoding, (element *)s->keys, keys, 0, count, head_dim, wanted_keys);
    decode_rows(&s->decoding, (element *)s->values, values, 0, count, value_dim, wanted_values);
    *keys = (Slots){s->keys, head_dim * (int64_t)sizeof(element), s->in_order, count};
    *values = (Slots){s->values, value_dim * (int64_t)sizeof(element), s->in_order, count};
}

/* `following` is the task that this thread is likely to take next, or NULL. */
static void go_through_keys(const Attention *a, const AttentionTask *t, const AttentionTask *following, Scratch *s) {
    const AttentionBatch *b = a->batch;
    const int64_t step = block_keys(b, t), values_panel_bytes = step / INPUTS_PER_STEP * STEP_BYTES;
    const int64_t kv_heads = t->kv_end - t->kv_begin;
    const int is_unpacked = takes_unpacked(b, t);
    const CacheType type = a->cache.type;
    Block block = first_block(b, t, s->slots[0]);
    for (int parity = 0; block.begin < t->key_end; parity = !parity) {
        const AttentionTask *whose_next = t;
        Block next = {block.end, smaller(t->key_end, block.end + step)};
        if (next.begin < next.end) {
            find_slots(s->slots[!parity], b, t->request, next.begin, next.end);
        } else if (following) {
            whose_next = following;
            next = first_block(b, following, s->slots[!parity]);
        }
        const int64_t *slots = s->slots[parity], *next_slots = s->slots[!parity], count = block.end - block.begin;
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t kv_head = t->kv_begin + head, first_row = head * head_rows(t);
            Slots keys = rows_in(&a->cache.keys, type, kv_head, slots, count);
            Slots values = rows_in(&a->cache.values, type, kv_head, slots, count);
            const Wanted wanted_keys =
                share_of(&a->cache.keys, type, b->head_dim, whose_next, next_slots, next, head, kv_heads, count);
            const Wanted wanted_values =
                share_of(&a->cache.values, type, b->value_dim, whose_next, next_slots, next, head, kv_heads, count);
            if (type != PLAIN) {
                const int64_t next_count = head == 0 ? next.end - next.begin : 0;
                find_scales(s->key_scales, &a->cache.keys, b->num_kv_heads, kv_head, slots, count, next_slots, next_count);
                find_scales(s->value_scales, &a->cache.values, b->num_kv_heads, kv_head, slots, count, next_slots,
                            next_count);
            }
            if (is_unpacked && type == PLAIN) {
                meet_unpacked(a, t, s, first_row, block.begin, &keys, &values, &wanted_keys, &wanted_values);
            } else if (is_unpacked) {
                decode_block(a, s, &keys, &values, &wanted_keys, &wanted_values);
                meet_unpacked(a, t, s, first_row, block.begin, &keys, &values, &nothing, &nothing);
            } else if (type == PLAIN) {
                pack_keys(s->keys, &keys, b->head_dim, &wanted_keys);
                pack_values(s->values, values_panel_bytes, &values, b->value_dim, &wanted_values);
                meet(a, t, s, first_row, block.begin, block.end, values_panel_bytes);
            } else {
                pack_codes(a, s, &keys, &values, values_panel_bytes, &wanted_keys, &wanted_values);
                meet(a, t, s, first_row, block.begin, block.end, values_panel_bytes);
            }
        }
        block.begin = block.end;
        if (whose_next == t)
            block = next;
    }
}

/* The output of a token's head from its sums; a sink is one more weight, of nothing. */
INLINE void finish(const Attention *a, int64_t token, int64_t head, const float *sums, float largest, float total) {
    const int64_t dim = a->batch->value_dim;
    float factor = 1;
    if (a->sinks) {
        const float sink = a->sinks[head] * LOG2_E, now = largest_float(largest, sink);
        factor = power_of_two(spread(largest - now))[0];
        total = total * factor + power_of_two(spread(sink - now))[0];
    }
    element *output = a->output + (token * a->batch->num_heads + head) * dim;
    for (int64_t d = 0; d < dim; d += LANES)
        store_some(output + d, load_floats(sums + d) * factor / total, dim - d);
}

static void end_rows(const Attention *a, const AttentionTask *t, const Scratch *s) {
    const AttentionBatch *b = a->batch;
    const int64_t rows = head_rows(t), all_rows = rows * (t->kv_end - t->kv_begin), stride = sum_floats(b->value_dim);
    const int64_t *first_parts = t->is_listed ? b->prefix_parts : b->own_parts;
    for (int64_t row = 0; row < all_rows; row++) {
        const int64_t token = s->token[row % rows], head = head_of(b, t, t->kv_begin + row / rows, row % rows);
        const float *sums = s->sums + row * stride;
        if (t->part < 0) {
            finish(a, token, head, sums, s->largest[row], s->total[row]);
        } else {
            float *part = part_of(b, first_parts[token] + t->part, head);
            memcpy(part, sums, stride * sizeof(float));
            part[stride] = s->largest[row];
            part[stride + 1] = s->total[row];
        }
    }
}

static void merge_parts(const Attention *a, int64_t token) {
    const AttentionBatch *b = a->batch;
    const int64_t first = b->own_parts[token], end = first + b->part_counts[token], stride = sum_floats(b->value_dim);
    _Alignas(64) float sums[MAX_SUM_FLOATS];
    for (int64_t head = 0; head < b->num_heads; head++) {
        float largest = -FLT_MAX, total = 0;
        for (int64_t part = first; part < end; part++)
            largest = largest_float(largest, part_of(b, part, head)[stride]);
        memset(sums, 0, stride * sizeof(float));
        for (int64_t part = first; part < end; part++) {
            const float *other = part_of(b, part, head);
            const float factor = power_of_two(spread(other[stride] - largest))[0];
            total += other[stride + 1] * factor;
            for (int64_t d = 0; d < stride; d += LANES)
                store_floats(sums + d, load_floats(sums + d) + load_floats(other + d) * factor);
        }
        finish(a, token, head, sums, largest, total);
    }
}

void attend(Worker *w, const Attention *a) {
    const AttentionBatch *b = a->batch;
    Scratch s;
    if (a->cache.type != PLAIN) {
        s.decoding = decoding_of(a->cache.type);
        for (int64_t i = 0; i < MAX_BLOCK_KEYS; i++)
            s.in_order[i] = i;
    }
    Tasks tasks = tasks_of(w, b->num_tasks);
    for (int64_t task; (task = next_task(&tasks)) >= 0;) {
        begin_rows(a, &b->tasks[task], &s);
        go_through_keys(a, &b->tasks[task], task + 1 < b->num_tasks ? &b->tasks[task + 1] : NULL, &s);
        end_rows(a, &b->tasks[task], &s);
    }
    end_phase(w);
    if (b->num_merged == 0)
        return;
    Tasks merges = tasks_of(w, b->num_merged);
    for (int64_t task; (task = next_task(&merges)) >= 0;)
        merge_parts(a, b->merged[task]);
    end_phase(w);
}

/* For Python: one layer's attention of its own. */
EXPORT void attention(const Attention *a, int num_threads) {
    if (a->batch->work < MIN_PARALLEL_WORK)
        num_threads = 1;
    WITH_TEAM(num_threads, worker, attend(&worker, a));
}
