/* A row is one thread's, and read twice: for its highest logit, then for everything else. Whoever is likelier than the
 * last of the likeliest so far is put in its place among them, which soon hardly ever happens.
 */

#include "logprobs.h"

#include "highest.h"

enum { BLOCK = 1024 /* tokens whose weights are added up in float32 */ };

typedef struct {
    int64_t size;
    float logits[MAX_TOP];
    int64_t ids[MAX_TOP];
} Top;

/* Those before it keep their places: equals come in the order of their ids. */
static void insert(Top *top, float logit, int64_t id) {
    int64_t place = top->size - 1;
    for (; place > 0 && !(top->logits[place - 1] >= logit); place--) {
        top->logits[place] = top->logits[place - 1];
        top->ids[place] = top->ids[place - 1];
    }
    top->logits[place] = logit;
    top->ids[place] = id;
}

/* -inf behind `count`. */
INLINE vector load_logits(const element *logits, int64_t count) {
    vector x = load_some(logits, count);
    for (int64_t i = count; i < LANES; i++)
        x[i] = -INFINITY;
    return x;
}

static void find_top(Top *top, int64_t num_top, const element *logits, int64_t vocab_size) {
    top->size = num_top;
    for (int64_t i = 0; i < num_top; i++)
        top->logits[i] = NAN; /* a place that is free */
    for (int64_t id = 0; id < num_top; id++)
        insert(top, to_float(logits[id]), id);
    if (!num_top)
        return;
    for (int64_t first = num_top; first < vocab_size; first += LANES) {
        const vector x = load_logits(logits + first, vocab_size - first);
        for (uint32_t lanes = lanes_of(x > top->logits[num_top - 1]); lanes; lanes &= lanes - 1) {
            const int64_t id = first + __builtin_ctz(lanes);
            if (to_float(logits[id]) > top->logits[num_top - 1])
                insert(top, to_float(logits[id]), id);
        }
    }
}

static void compute_row(const Logprobs *l, int64_t row) {
    const element *logits = l->logits + row * l->stride;
    const float highest = highest_of(logits, l->vocab_size), chosen = to_float(logits[l->token_ids[row]]);
    double weight = 0;
    int64_t likelier = 0;
    for (int64_t begin = 0; begin < l->vocab_size; begin += BLOCK) {
        const int64_t end = begin + BLOCK < l->vocab_size ? begin + BLOCK : l->vocab_size;
        vector sum = {0};
        for (int64_t i = begin; i < end; i += LANES) {
            const vector x = load_logits(logits + i, end - i);
            sum += exponential(x - highest);
            likelier += __builtin_popcount(lanes_of(x > chosen));
        }
        weight += sum_of(sum);
    }
    const double normalizer = highest + log(weight);
    l->logprobs[row] = (float)(chosen - normalizer);
    l->ranks[row] = likelier + 1;

    Top top;
    find_top(&top, l->num_top, logits, l->vocab_size);
    for (int64_t i = 0; i < l->num_top; i++) {
        l->top_ids[row * l->num_top + i] = top.ids[i];
        l->top_logprobs[row * l->num_top + i] = (float)(top.logits[i] - normalizer);
    }
}

static void compute_in_team(Worker *w, const Logprobs *l) {
    Tasks tasks = tasks_of(w, l->rows);
    for (int64_t row; (row = next_task(&tasks)) >= 0;)
        compute_row(l, row);
}

void token_logprobs(const Logprobs *l, int num_threads) { WITH_TEAM(num_threads, worker, compute_in_team(&worker, l)); }
