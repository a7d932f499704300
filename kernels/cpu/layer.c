#include "layer.h"

#include "write_kv.h"

static void normalize_rows(Worker *w, element *y, const element *x, const element *residual, const Norm *n,
                           int64_t num_rows) {
    FOR_ROWS(w, num_rows, row)
        normalize(y + row * n->size, x + row * n->size, residual ? residual + row * n->size : NULL, n);
    end_phase(w);
}

/* `y` = the product of `x`, normalized if there is such a norm, plus `residual`. */
static void add_product(Worker *w, const Weight *weight, const Norm *norm, const LayerStep *s, const element *x,
                        element *y, const element *residual) {
    const int is_normed = norm->weight != NULL;
    const Product product = {.weight = weight,
                             .x = x,
                             .y = is_normed ? s->normed : y,
                             .residual = is_normed ? NULL : residual,
                             .rows = s->num_tokens,
                             .lora = s->lora};
    multiply(w, &product);
    if (is_normed)
        normalize_rows(w, y, s->normed, residual, norm, s->num_tokens);
}

/* `x`, or where there is such a norm what it makes of it. */
static const element *normalized(Worker *w, const Norm *norm, const element *x, element *scratch, int64_t num_rows) {
    if (!norm->weight)
        return x;
    normalize_rows(w, scratch, x, NULL, norm, num_rows);
    return scratch;
}

/* Queries or keys of one token: normalized, by heads or all together, and rotated. */
static void finish_heads(const Layer *layer, const LayerStep *s, const Norm *norm, element *heads, int64_t num_heads,
                         int64_t token) {
    const int64_t size = num_heads * layer->head_dim, rotary_dim = layer->rotary_dim;
    if (norm->weight)
        for (element *x = heads; x < heads + size; x += norm->size)
            normalize(x, x, NULL, norm);
    if (rotary_dim)
        for (element *x = heads; x < heads + size; x += layer->head_dim)
            rotate(x, s->cosines + token * rotary_dim, s->sines + token * rotary_dim, rotary_dim);
}

static void write_token(const Layer *layer, const element *keys, const element *values, int64_t slot) {
    const KVCache *cache = &layer->attention.cache;
    const int64_t dim = layer->head_dim;
    write_slot(&cache->keys, cache->type, slot, keys, dim, layer->num_kv_heads, dim);
    write_slot(&cache->values, cache->type, slot, values, dim, layer->num_kv_heads, dim);
}

/* Queries and keys as attention wants them; keys and values in the caches, if there are any. */
static void finish_tokens(Worker *w, const Layer *layer, const LayerStep *s) {
    const int64_t query_size = layer->num_heads * layer->head_dim, key_size = layer->num_kv_heads * layer->head_dim;
    const int64_t *slots = s->slots ? s->slots[layer->kind] : NULL;
    FOR_ROWS(w, s->num_tokens, token) {
        element *queries = s->qkv + token * (query_size + 2 * key_size), *keys = queries + query_size;
        finish_heads(layer, s, &layer->of_queries, queries, layer->num_heads, token);
        finish_heads(layer, s, &layer->of_keys, keys, layer->num_kv_heads, token);
        if (slots && slots[token] >= 0)
            write_token(layer, keys, keys + key_size, slots[token]);
    }
    end_phase(w);
}

static void before_attention(Worker *w, const Layer *layer, const LayerStep *s, const element *x) {
    const Product qkv = {.weight = &layer->qkv,
                         .x = normalized(w, &layer->before_attention, x, s->normed, s->num_tokens),
                         .y = s->qkv,
                         .rows = s->num_tokens,
                         .lora = s->lora};
    multiply(w, &qkv);
    finish_tokens(w, layer, s);
}

/* `y` may be `x`. */
static void after_attention(Worker *w, const Layer *layer, const LayerStep *s, const element *x, element *y) {
    add_product(w, &layer->output, &layer->after_attention, s, s->attended, y, x);
    const Product gated = {.weight = &layer->up,
                           .gate = &layer->gate,
                           .x = normalized(w, &layer->before_mlp, y, s->normed, s->num_tokens),
                           .y = s->gated,
                           .rows = s->num_tokens,
                           .activation = layer->activation,
                           .lora = s->lora};
    multiply(w, &gated);
    add_product(w, &layer->down, &layer->after_mlp, s, s->gated, y, y);
}

static void attend_step(Worker *w, const Layer *layer, const LayerStep *s) {
    Attention a = layer->attention;
    a.batch = s->batches[layer->kind];
    a.query = s->qkv;
    a.output = s->attended;
    attend(w, &a);
}

static void all_layers(Worker *w, const Layer *layers, int64_t num_layers, const LayerStep *s, const element *x,
                       element *y) {
    for (const Layer *layer = layers; layer < layers + num_layers; layer++, x = y) {
        before_attention(w, layer, s, x);
        attend_step(w, layer, s);
        after_attention(w, layer, s, x, y);
    }
}

/* For Python: layers, each of which reads what the one before has made; and one layer in two parts, for attention of
 * another kind between them. */
EXPORT void decoder_layers(const Layer *layers, int64_t num_layers, const LayerStep *s, const element *x, element *y,
                           int num_threads) {
    WITH_TEAM(num_threads, worker, all_layers(&worker, layers, num_layers, s, x, y));
}

EXPORT void layer_before_attention(const Layer *layer, const LayerStep *s, const element *x, int num_threads) {
    WITH_TEAM(num_threads, worker, before_attention(&worker, layer, s, x));
}

EXPORT void layer_after_attention(const Layer *layer, const LayerStep *s, const element *x, element *y,
                                  int num_threads) {
    WITH_TEAM(num_threads, worker, after_attention(&worker, layer, s, x, y));
}
