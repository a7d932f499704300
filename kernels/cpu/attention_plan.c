/* What the tasks of a step's attention are.
 *
 * A request's tokens are cut where their rows are more than a task may have; those of requests that share a prefix are
 * rows of the same tasks for its keys. Then keys are cut, until every thread has several tasks of about the same size:
 * what a token gets from its parts is put together afterwards (Dao et al., "Flash-Decoding for long-context inference",
 * 2023). A decode's rows are so few that reading the keys is all there is to do: its tasks take all KV heads, whose keys
 * lie side by side.
 */

#include "attention.h"

enum {
    TASKS_PER_THREAD = 4,
    MIN_PART_KEYS = 64,
    MIN_TASK_ROWS = 72, /* with fewer, packing the keys anew for each task costs too much */
    PACKING_ROWS = 8    /* how many rows could be computed while keys are read and packed */
};
/* In products: with less, handing out a task and putting its part with the others is too much of it. */
static const int64_t MIN_TASK_WORK = 1 << 18;

typedef struct {
    AttentionBatch *b;
    int64_t group_size;                /* how many heads share a KV head */
    int64_t task_tokens, task_members; /* most of a task */
    int64_t fair_work;                 /* of a task; 0 while it is not known and no task is made */
    int64_t work;
} Planner;

static void add_task(AttentionBatch *b, const AttentionTask *t) {
    if (b->num_tasks < b->max_tasks)
        b->tasks[b->num_tasks] = *t;
    b->num_tasks++;
}

/* The part of each KV head's work is the same, and that of all members as well: their keys are cut alike. */
static int64_t work_of_head(const Planner *p, const AttentionTask *t) {
    const int64_t rows = smaller(t->tokens * p->group_size, MAX_ROWS) + PACKING_ROWS;
    return (t->key_end - t->key_begin) * rows * (p->b->head_dim + p->b->value_dim);
}

/* All tasks for the tokens and keys of `t`. Returns into how many parts the keys are cut. */
static int64_t add_tasks(Planner *p, AttentionTask t, int is_output) {
    AttentionBatch *b = p->b;
    const int64_t heads = b->num_kv_heads, num_keys = t.key_end - t.key_begin, work = work_of_head(p, &t);
    if (num_keys <= 0)
        return 0;
    p->work += work * heads;
    if (p->fair_work == 0)
        return 0;
    const int64_t rows = t.tokens * p->group_size, most_parts = larger(1, num_keys / MIN_PART_KEYS);
    const int64_t parts_of_all = (work * heads + p->fair_work - 1) / p->fair_work;
    const int takes_all =
        rows <= FEW_ROWS && rows * heads <= most_rows(b->head_dim, b->value_dim) && parts_of_all <= most_parts;
    const int64_t together = takes_all ? heads : 1;
    const int64_t parts = smaller(most_parts, (work * together + p->fair_work - 1) / p->fair_work);
    const int64_t key_begin = t.key_begin;
    for (int64_t part = 0; part < parts; part++) {
        t.part = is_output && parts == 1 ? -1 : part;
        t.key_begin = key_begin + part * num_keys / parts / PANEL_KEYS * PANEL_KEYS;
        t.key_end = key_begin + (part + 1 == parts ? num_keys : (part + 1) * num_keys / parts / PANEL_KEYS * PANEL_KEYS);
        for (t.kv_begin = 0; t.kv_begin < heads; t.kv_begin = t.kv_end) {
            t.kv_end = t.kv_begin + together;
            for (t.member_begin = 0; t.member_begin < p->group_size; t.member_begin = t.member_end) {
                t.member_end = smaller(p->group_size, t.member_begin + p->task_members);
                add_task(b, &t);
            }
        }
    }
    return is_output && parts == 1 ? 0 : parts;
}

static void add_tasks_of_prefix(Planner *p, int64_t request, int64_t listed_begin, int64_t listed_end, int64_t length) {
    AttentionBatch *b = p->b;
    const int64_t tokens = listed_end - listed_begin, chunks = (tokens + p->task_tokens - 1) / p->task_tokens;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        AttentionTask t = {.request = request, .first = listed_begin + chunk * tokens / chunks, .is_listed = 1};
        t.tokens = listed_begin + (chunk + 1) * tokens / chunks - t.first;
        t.key_begin = t.key_end = length;
        for (int64_t i = 0; i < t.tokens; i++)
            t.key_begin = smaller(t.key_begin, b->first_seen[b->listed[t.first + i]]);
        const int64_t parts = add_tasks(p, t, 0);
        for (int64_t i = 0; i < t.tokens; i++)
            b->prefix_parts[b->listed[t.first + i]] = parts;
    }
}

static void add_tasks_of_request(Planner *p, int64_t request) {
    AttentionBatch *b = p->b;
    const int64_t begin = b->query_start_loc[request], tokens = b->query_start_loc[request + 1] - begin;
    const int64_t prefix = b->prefix_of ? b->prefix_of[request] : -1;
    const int64_t chunks = (tokens + p->task_tokens - 1) / p->task_tokens;
    /* The longest first. */
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        AttentionTask t = {.request = request, .first = begin + chunk * tokens / chunks};
        t.tokens = begin + (chunk + 1) * tokens / chunks - t.first;
        t.key_begin = larger(b->first_seen[t.first], prefix < 0 ? 0 : b->prefix_lens[prefix]);
        t.key_end = b->end_seen[t.first + t.tokens - 1];
        const int64_t parts = add_tasks(p, t, prefix < 0);
        for (int64_t i = 0; i < t.tokens; i++)
            b->own_parts[t.first + i] = parts;
    }
}

static void add_all_tasks(Planner *p) {
    AttentionBatch *b = p->b;
    p->work = b->num_tasks = b->num_listed = 0;
    for (int64_t prefix = 0; prefix < b->num_prefixes; prefix++) {
        const int64_t listed_begin = b->num_listed;
        int64_t member = -1;
        for (int64_t request = 0; request < b->num_requests; request++)
            if (b->prefix_of[request] == prefix) {
                member = request;
                for (int64_t i = b->query_start_loc[request]; i < b->query_start_loc[request + 1]; i++)
                    b->listed[b->num_listed++] = i;
            }
        add_tasks_of_prefix(p, member, listed_begin, b->num_listed, b->prefix_lens[prefix]);
    }
    for (int64_t request = 0; request < b->num_requests; request++)
        add_tasks_of_request(p, request);
}

static void find_what_is_seen(AttentionBatch *b) {
    for (int64_t request = 0; request < b->num_requests; request++) {
        const int64_t end = b->query_start_loc[request + 1];
        for (int64_t token = b->query_start_loc[request]; token < end; token++) {
            const int64_t own_end = b->seq_lens[request] - (end - token) + 1;
            b->first_seen[token] = larger(0, own_end - b->window);
            b->end_seen[token] = b->visible_to ? b->visible_to[token] : own_end;
        }
    }
}

/* Parts of a token lie one behind the other, first those of its own keys. */
static void place_parts(AttentionBatch *b) {
    b->num_parts = b->num_merged = 0;
    for (int64_t token = 0; token < b->num_tokens; token++) {
        const int64_t own = b->own_parts[token], shared = b->prefix_parts[token];
        b->own_parts[token] = b->num_parts;
        b->prefix_parts[token] = b->num_parts + own;
        b->part_counts[token] = own + shared;
        b->num_parts += own + shared;
        if (own + shared)
            b->merged[b->num_merged++] = token;
    }
}

/* Returns how many tasks there are, which may be more than there is room for: then the plan is of no use. */
EXPORT int64_t plan_attention(AttentionBatch *b) {
    const int64_t group_size = b->num_heads / b->num_kv_heads, most = most_rows(b->head_dim, b->value_dim);
    const int64_t tasks = b->num_threads > 1 ? TASKS_PER_THREAD * b->num_threads : 1;
    const int64_t wanted = (tasks + b->num_kv_heads - 1) / b->num_kv_heads;
    const int64_t fair_rows = b->num_tokens * group_size / wanted;
    const int64_t rows = smaller(most, larger(MIN_TASK_ROWS, fair_rows));
    Planner p = {
        .b = b,
        .group_size = group_size,
        .task_tokens = larger(1, rows / group_size),
        .task_members = smaller(group_size, most),
    };
    find_what_is_seen(b);
    memset(b->prefix_parts, 0, b->num_tokens * sizeof *b->prefix_parts);
    add_all_tasks(&p);
    p.fair_work = larger(MIN_TASK_WORK, p.work / tasks + 1);
    add_all_tasks(&p);
    place_parts(b);
    b->work = p.work;
    return b->num_tasks;
}
