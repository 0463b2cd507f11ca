/* What the mock engines answer: vLLM's shapes where a proxy looks at them. */
#include "mock.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SSE_HEAD \
    "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n" \
    "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
#define MAX_CACHED 16

static char *metrics_page;
static size_t metrics_len;

/* Whole answers (head and body) of a size, built once: a 5 MB answer costs the mock no more than its write. */
static struct {
    size_t size;
    char *data;
    size_t len;
} cached[MAX_CACHED];
static int cached_count;

static char *whole(const char *type, const char *body, size_t size, size_t *len) {
    char *data = must_alloc(size + 256);
    int head = snprintf(data, 256,
                        "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
                        "content-length: %zu\r\ncontent-type: %s\r\n\r\n",
                        size, type);
    memcpy(data + head, body, size);
    *len = (size_t)head + size;
    return data;
}

static const char *completion(size_t size, size_t *len) {
    for (int i = 0; i < cached_count; i++) {
        if (cached[i].size == size) {
            *len = cached[i].len;
            return cached[i].data;
        }
    }
    if (cached_count == MAX_CACHED) die("over %d sizes of answers", MAX_CACHED);
    static const char front[] =
        "{\"id\":\"cmpl-bench\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"text\":\"";
    static const char back[] =
        "\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"prompt_logprobs\":null}],"
        "\"usage\":{\"prompt_tokens\":512,\"total_tokens\":528,\"completion_tokens\":16,"
        "\"prompt_tokens_details\":null},\"kv_transfer_params\":null}";
    size_t fixed = sizeof front + sizeof back - 2;
    if (size < fixed) size = fixed;
    char *body = must_alloc(size + 1);
    memset(body, 'x', size);
    memcpy(body, front, sizeof front - 1);
    memcpy(body + size - (sizeof back - 1), back, sizeof back - 1);
    cached[cached_count].size = size;
    cached[cached_count].data = whole("application/json", body, size, &cached[cached_count].len);
    free(body);
    *len = cached[cached_count].len;
    return cached[cached_count++].data;
}

static void reply(struct conn *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void reply(struct conn *c, const char *format, ...) {
    char body[2048];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(body, sizeof body, format, args);
    va_end(args);
    char head[256];
    int len = snprintf(head, sizeof head,
                       "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
                       "content-length: %d\r\ncontent-type: application/json\r\n\r\n",
                       size);
    char all[sizeof head + sizeof body];
    memcpy(all, head, (size_t)len);
    memcpy(all + len, body, (size_t)size);
    send_copy(c, all, (size_t)(len + size));
    answered(c);
}

static void reply_metrics(struct conn *c) {
    send_shared(c, metrics_page, metrics_len);
    answered(c);
}

static unsigned long long number(const char *text, const char *name, unsigned long long otherwise) {
    const char *found = strstr(text, name);
    return found ? strtoull(found + strlen(name), NULL, 10) : otherwise;
}

/* Reads what stands in one part of a body. A wish may be cut off where the part ends; then the other part has it. */
static void read_part(struct wish *wish, const char *text) {
    if (strstr(text, "\"stream\":true") || strstr(text, "\"stream\": true")) wish->stream = true;
    char line[256];
    const char *found = strstr(text, "bench n=");
    const char *end = found ? strchr(found, '"') : NULL;
    if (end == NULL || (size_t)(end - found) >= sizeof line) return;
    memcpy(line, found, (size_t)(end - found));
    line[end - found] = '\0';
    wish->events = (unsigned)number(line, " n=", 16);
    wish->interval_ns = number(line, " us=", 0) * NS_PER_US;
    wish->size = number(line, " size=", 1024);
    wish->delay_ns = number(line, " delay=", options.default_delay_ns / NS_PER_US) * NS_PER_US;
    wish->hold = number(line, " hold=", 0) != 0;
}

static struct wish read_wish(const struct conn *c) {
    struct wish wish = {.events = 16, .size = 1024, .delay_ns = options.default_delay_ns};
    char part[2 * BODY_KEPT + 1];
    size_t size = c->body_len < BODY_KEPT ? c->body_len : BODY_KEPT;
    memcpy(part, c->first, size);
    part[size] = '\0';
    read_part(&wish, part);
    memcpy(part, c->last, c->last_len);
    part[c->last_len] = '\0';
    read_part(&wish, part);
    return wish;
}

static void answer_generation(struct conn *c) {
    if (!c->wish.stream) {
        size_t len;
        const char *data = completion(c->wish.size, &len);
        send_shared(c, data, len);
        answered(c);
        return;
    }
    c->events_left = c->wish.events;
    send_shared(c, SSE_HEAD, sizeof SSE_HEAD - 1);
    if (c->fd < 0) return;
    if (c->wish.interval_ns)
        timer_set(c, now_ns());
    else
        list_add(&flat, c);
}

void emit_event(struct conn *c) {
    char event[512];
    char chunk[640];
    bool last = --c->events_left == 0;
    int size = snprintf(event, sizeof event,
                        "data: {\"id\":\"cmpl-bench\",\"object\":\"text_completion\",\"created\":1700000000,"
                        "\"model\":\"bench\",\"choices\":[{\"index\":0,\"text\":\"t=%llu;\",\"logprobs\":null,"
                        "\"finish_reason\":%s,\"stop_reason\":null}],\"usage\":null}\n\n%s",
                        (unsigned long long)now_ns(), last ? "\"length\"" : "null", last ? "data: [DONE]\n\n" : "");
    int len = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n%s", (unsigned)size, event, last ? "0\r\n\r\n" : "");
    send_copy(c, chunk, (size_t)len);
    if (c->fd < 0) return;
    if (last) {
        list_remove(&flat, c);
        answered(c);
    } else if (c->wish.interval_ns) {
        timer_set(c, c->due + c->wish.interval_ns);
    }
}

void due_now(struct conn *c) {
    if (!c->generation)
        reply(c, "%s", c->own ? c->own : "{}");
    else if (c->events_left)
        emit_event(c);
    else
        answer_generation(c);
}

/* The answer of a control call, after the time that control calls take. */
static void control(struct conn *c, const char *body) {
    c->engine->calls++;
    if (options.control_ns == 0) {
        reply(c, "%s", body);
        return;
    }
    size_t size = strlen(body) + 1;
    if (c->own_cap < size) {
        c->own = must_grow(c->own, size);
        c->own_cap = size;
    }
    memcpy(c->own, body, size);
    timer_set(c, now_ns() + options.control_ns);
}

/* /bench/...: the harness's own calls, sent to an engine directly. */
static void bench(struct conn *c, const char *path) {
    if (strncmp(path, "/bench/stats ", 13) == 0) {
        uint64_t requests = 0, open = 0, aborted = 0, calls = 0, accepted = 0;
        uint64_t least = UINT64_MAX, most = 0;
        for (unsigned i = 0; i < options.engines; i++) {
            requests += engines[i].requests;
            open += engines[i].open;
            aborted += engines[i].aborted;
            calls += engines[i].calls;
            accepted += engines[i].accepted;
            if (engines[i].requests < least) least = engines[i].requests;
            if (engines[i].requests > most) most = engines[i].requests;
        }
        reply(c,
              "{\"requests\":%llu,\"open\":%llu,\"held\":%d,\"aborted\":%llu,\"calls\":%llu,\"accepted\":%llu,"
              "\"least\":%llu,\"most\":%llu,\"first_ns\":%llu,\"last_ns\":%llu,\"now_ns\":%llu}",
              (unsigned long long)requests, (unsigned long long)open, held.count, (unsigned long long)aborted,
              (unsigned long long)calls, (unsigned long long)accepted, (unsigned long long)least,
              (unsigned long long)most, (unsigned long long)first_arrival, (unsigned long long)last_arrival,
              (unsigned long long)now_ns());
    } else if (strncmp(path, "/bench/reset ", 13) == 0) {
        for (unsigned i = 0; i < options.engines; i++) {
            engines[i].requests = engines[i].aborted = engines[i].calls = engines[i].accepted = 0;
        }
        first_arrival = last_arrival = 0;
        reply(c, "{}");
    } else if (strncmp(path, "/bench/release ", 15) == 0) {
        reply(c, "{\"released\":%d}", held.count);
        while (held.count) {
            struct conn *waiting = held.item[held.count - 1];
            list_remove(&held, waiting);
            answer_generation(waiting);
        }
    } else if (strncmp(path, "/bench/control_us=", 18) == 0) {
        options.control_ns = strtoull(path + 18, NULL, 10) * NS_PER_US;
        reply(c, "{}");
    } else {
        reply(c, "{\"error\":\"no such call\"}");
    }
}

static bool is(const char *path, const char *name) {
    size_t len = strlen(name);
    return strncmp(path, name, len) == 0 && (path[len] == ' ' || path[len] == '?');
}

static void set_version(struct conn *c) {
    char body[BODY_KEPT + 1];
    size_t size = c->body_len < BODY_KEPT ? c->body_len : BODY_KEPT;
    memcpy(body, c->first, size);
    body[size] = '\0';
    const char *found = strstr(body, "weight_version");
    if (found) found = strchr(found, ':');
    if (found) found = strchr(found, '"');
    if (found) sscanf(found + 1, "%63[^\"]", c->engine->version);
}

void handle(struct conn *c) {
    const char *path = memchr(c->head, '/', c->head_len);
    char none[] = "/ ";
    if (path == NULL) path = none;
    c->generation = false;
    c->events_left = 0;
    if (strncmp(path, "/bench/", 7) == 0) {
        bench(c, path);
    } else if (is(path, "/v1/completions") || is(path, "/v1/chat/completions") || is(path, "/inference/v1/generate") ||
               is(path, "/generate")) {
        c->generation = true;
        c->wish = read_wish(c);
        c->engine->requests++;
        c->engine->open++;
        last_arrival = now_ns();
        if (first_arrival == 0) first_arrival = last_arrival;
        if (c->wish.hold)
            list_add(&held, c);
        else if (c->wish.delay_ns)
            timer_set(c, now_ns() + c->wish.delay_ns);
        else
            answer_generation(c);
    } else if (is(path, "/health") || is(path, "/health_generate")) {
        reply(c, "%s", "");
    } else if (is(path, "/metrics")) {
        reply_metrics(c);
    } else if (is(path, "/v1/models")) {
        reply(c, "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":1700000000,"
                 "\"owned_by\":\"vllm\",\"root\":\"bench\",\"parent\":null,\"max_model_len\":32768}]}");
    } else if (is(path, "/is_paused")) {
        reply(c, "{\"is_paused\":%s}", c->engine->paused ? "true" : "false");
    } else if (is(path, "/weight_info")) {
        reply(c, "{\"weight_version\":\"%s\"}", c->engine->version);
    } else if (is(path, "/get_world_size")) {
        reply(c, "{\"world_size\":1}");
    } else if (is(path, "/is_sleeping")) {
        reply(c, "{\"is_sleeping\":false}");
    } else if (is(path, "/pause")) {
        c->engine->paused = true;
        control(c, "{\"status\":\"paused\"}");
    } else if (is(path, "/resume")) {
        c->engine->paused = false;
        control(c, "{\"status\":\"resumed\"}");
    } else if (is(path, "/abort_requests")) {
        control(c, "{\"status\":\"aborted\",\"aborted\":0}");
    } else if (is(path, "/update_weight_version") || is(path, "/finish_weight_update")) {
        set_version(c);
        control(c, "{\"status\":\"ok\"}");
    } else if (is(path, "/get_model_info") || is(path, "/get_server_info") || is(path, "/server_info")) {
        reply(c, "{\"model_path\":\"bench\",\"is_generation\":true,\"served_model_name\":\"bench\"}");
    } else {
        control(c, "{\"status\":\"ok\"}");
    }
}

/* A page as long as vLLM's own (about 630 lines, 52 KB): counters, gauges and histograms with its labels. */
void prepare_answers(void) {
    static const char *names[] = {"time_to_first_token_seconds", "inter_token_latency_seconds",
                                  "e2e_request_latency_seconds", "request_queue_time_seconds",
                                  "request_inference_time_seconds", "request_prefill_time_seconds",
                                  "request_decode_time_seconds", "request_prompt_tokens",
                                  "request_generation_tokens", "iteration_tokens_total",
                                  "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
                                  "request_time_per_output_token_seconds", "kv_block_lifetime_seconds",
                                  "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
                                  "prompt_tokens_by_source", "prefix_cache_block_hits", "spec_decode_accepted"};
    static const char *bounds[] = {"0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25",
                                   "0.5",   "0.75",  "1.0",  "2.5",  "5.0",  "7.5",  "10.0", "20.0", "40.0",
                                   "80.0",  "160.0", "640.0", "2560.0", "+Inf"};
    char *page = must_alloc(1 << 17);
    size_t at = (size_t)sprintf(page,
                                "# HELP process_start_time_seconds Start time of the process since unix epoch in "
                                "seconds.\n# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %lld.25\n"
                                "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
                                "# TYPE vllm:num_requests_running gauge\n"
                                "vllm:num_requests_running{engine=\"0\",model_name=\"bench\"} 3.0\n"
                                "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
                                "# TYPE vllm:num_requests_waiting gauge\n"
                                "vllm:num_requests_waiting{engine=\"0\",model_name=\"bench\"} 1.0\n",
                                (long long)time(NULL));
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        at += (size_t)sprintf(page + at, "# HELP vllm:%s Histogram of %s.\n# TYPE vllm:%s histogram\n", names[n],
                              names[n], names[n]);
        for (size_t b = 0; b < sizeof bounds / sizeof *bounds; b++)
            at += (size_t)sprintf(page + at, "vllm:%s_bucket{engine=\"0\",le=\"%s\",model_name=\"bench\"} %zu.0\n",
                                  names[n], bounds[b], 1000 * b);
        at += (size_t)sprintf(page + at,
                              "vllm:%s_count{engine=\"0\",model_name=\"bench\"} 22000.0\n"
                              "vllm:%s_sum{engine=\"0\",model_name=\"bench\"} 12345.678901\n",
                              names[n], names[n]);
    }
    metrics_page = whole("text/plain; version=0.0.4; charset=utf-8", page, at, &metrics_len);
    free(page);
}
