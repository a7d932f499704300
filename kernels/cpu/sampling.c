/* A row's tokens are divided into chunks, for threads to share it. The highest logit of each chunk comes first, then
 * what min-p, top-k and top-p keep of the row, then for random rows the best score of each chunk.
 *
 * Logarithms are for the few tokens that may win. Noise is -log(-log u), and -log u is at least 1 - u: so a score of
 * `best` or more takes 1 - u <= e^(scaled - best). A line between two powers of two is above the exponential there, and
 * 1 - u is rounded down to 31 bits, which takes no more than the hash and a dozen simple instructions. Whoever passes is
 * scored in float64, as the reference has it. From the first token of the row on there is a score to beat: the one that
 * the likeliest token has.
 */

#include "sampling.h"

#include "gumbel.h"
#include "highest.h"

enum { CHUNK = 8192, MIN_PARALLEL_TOKENS = 32768 /* about what starting the threads takes */ };

/* The best token of some. */
typedef struct {
    double score;
    int64_t token;
} Best;

/* A row from which is drawn. */
typedef struct {
    Row row;
    Kept kept;
    uint64_t key; /* of its noise */
    Best likeliest;
} Draw;

typedef struct {
    const Sampling *given;
    int64_t chunks;
    Draw *draws;    /* [rows] */
    Best *best;     /* [rows, chunks] */
    float *highest; /* [rows, chunks] */
} Work;

INLINE int64_t chunks_of_a_row(int64_t vocab_size) { return (vocab_size + CHUNK - 1) / CHUNK; }

typedef struct {
    int64_t begin, end;
} Tokens;

INLINE Tokens tokens_of(const Sampling *s, int64_t chunk) {
    const int64_t begin = chunk * CHUNK, end = begin + CHUNK;
    return (Tokens){begin, end < s->vocab_size ? end : s->vocab_size};
}

INLINE int is_random(const Sampling *s, int64_t row) { return s->temperature && s->temperature[row] > 0; }

/* The first of `tokens` with this logit; the first of all where none has. */
static int64_t find(const element *logits, Tokens tokens, float logit) {
    for (int64_t token = tokens.begin; token < tokens.end; token += LANES) {
        const uint32_t equal = lanes_of(load_some(logits + token, tokens.end - token) == logit);
        if (equal && token + __builtin_ctz(equal) < tokens.end)
            return token + __builtin_ctz(equal);
    }
    return tokens.begin;
}

static double score(const Row *row, uint64_t key, int64_t token) {
    return (double)scaled(row, to_float(row->logits[token])) + noise(key, token);
}

INLINE int is_better(Best a, Best b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

/* Floats with a fraction of 23 bits that, as bits of a float, are 2^31 · e^(x - best) and a little more. */
enum { FRACTION = 1 << 23 };
static const float LOG2_E = 1.44269504f;
/* No noise is larger than 54 log 2. */
static const float TOO_LITTLE = (31 + 127 - 54) * (float)FRACTION, ENOUGH = (31 + 127 + 1) * (float)FRACTION;

INLINE vector exponent_at(double best) {
    return spread((31 + 127 + 0.01f - (float)best * LOG2_E) * (float)FRACTION);
}

/* The best of `tokens` and the likeliest of the row. */
static Best draw(const Draw *d, Tokens tokens) {
    const Row *row = &d->row;
    const vector too_little = spread(TOO_LITTLE), enough = spread(ENOUGH);
    /* Beyond float32 it would be infinite, and no number when multiplied by the highest logit's 0. */
    const float rate = fminf(LOG2_E * (float)FRACTION / row->temperature, 3e38f);
    Best best = d->likeliest;
    vector at_best = exponent_at(best.score);
    Hashing hashing = hashing_from(d->key, tokens.begin);
    for (int64_t first = tokens.begin; first < tokens.end; first += LANES, hashing = next_tokens(hashing)) {
        const vector logits = load_some(row->logits + first, tokens.end - first);
        vector exponent = (logits - row->highest) * rate + at_best;
        const integers may_win = (logits >= d->kept.threshold) & (exponent > TOO_LITTLE);
        if (!lanes_of(may_win))
            continue;
        exponent = choose(may_win, exponent, too_little);
        exponent = choose(exponent < enough, exponent, enough);
        const vector bound = (vector)__builtin_convertvector(exponent, integers);
        const vector rest = __builtin_convertvector((integers)(~high_halves(hashing) >> 1), vector);
        for (uint32_t lanes = lanes_of(may_win & (rest <= bound)); lanes; lanes &= lanes - 1) {
            const int64_t token = first + __builtin_ctz(lanes);
            if (token >= tokens.end ||
                (to_float(row->logits[token]) == d->kept.threshold && token > d->kept.last_equal))
                continue;
            const Best its = {score(row, d->key, token), token};
            if (is_better(its, best)) {
                best = its;
                at_best = exponent_at(best.score);
            }
        }
    }
    return best;
}

/* What the highest logits of its chunks say of a row. */
static void begin_row(const Work *work, int64_t index, Tables *tables) {
    const Sampling *s = work->given;
    const float *highest = work->highest + index * work->chunks;
    int64_t chunk = 0;
    for (int64_t other = 1; other < work->chunks; other++)
        chunk = highest[other] > highest[chunk] ? other : chunk;
    const element *logits = s->logits + index * s->stride;
    const int64_t likeliest = find(logits, tokens_of(s, chunk), highest[chunk]);
    s->tokens[index] = likeliest;
    if (!is_random(s, index))
        return;
    Draw *d = work->draws + index;
    d->row = (Row){logits, s->vocab_size, highest[chunk], s->temperature[index]};
    d->kept = (Kept){-INFINITY, s->vocab_size};
    if (s->top_k)
        d->kept = restrict_row(&d->row, (Restriction){s->top_k[index], s->top_p[index], s->min_p[index]}, tables);
    d->key = noise_key(s->seeds[index], s->positions[index]);
    d->likeliest = (Best){score(&d->row, d->key, likeliest), likeliest};
}

static void sample_in_team(Worker *w, const Work *work) {
    const Sampling *s = work->given;
    const int64_t chunks = work->chunks;
    Tasks tasks = tasks_of(w, s->rows * chunks);
    for (int64_t task; (task = next_task(&tasks)) >= 0;) {
        const Tokens tokens = tokens_of(s, task % chunks);
        const element *row = s->logits + task / chunks * s->stride;
        work->highest[task] = highest_of(row + tokens.begin, tokens.end - tokens.begin);
    }
    end_phase(w);

    tasks = tasks_of(w, s->rows);
    for (int64_t task; (task = next_task(&tasks)) >= 0;)
        begin_row(work, task, s->tables + w->rank);
    if (!s->temperature)
        return;
    end_phase(w);

    tasks = tasks_of(w, s->rows * chunks);
    for (int64_t task; (task = next_task(&tasks)) >= 0;)
        if (is_random(s, task / chunks))
            work->best[task] = draw(work->draws + task / chunks, tokens_of(s, task % chunks));
}

int workspace_bytes(const Sampling *s) {
    const int64_t chunks = chunks_of_a_row(s->vocab_size);
    return (int)(s->rows * (sizeof(Draw) + chunks * (sizeof(Best) + sizeof(float))));
}

void sample(const Sampling *s, int num_threads) {
    Work work = {s, chunks_of_a_row(s->vocab_size), NULL, NULL, NULL};
    work.draws = (Draw *)s->workspace;
    work.best = (Best *)(work.draws + s->rows);
    work.highest = (float *)(work.best + s->rows * work.chunks);
    if (s->rows * s->vocab_size < MIN_PARALLEL_TOKENS)
        num_threads = 1;
    WITH_TEAM(num_threads, worker, sample_in_team(&worker, &work));
    for (int64_t row = 0; row < s->rows; row++)
        if (is_random(s, row)) {
            Best best = work.draws[row].likeliest;
            for (int64_t chunk = 0; chunk < work.chunks; chunk++)
                if (is_better(work.best[row * work.chunks + chunk], best))
                    best = work.best[row * work.chunks + chunk];
            s->tokens[row] = best.token;
        }
}
