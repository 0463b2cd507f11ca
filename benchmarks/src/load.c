/* The load generator's modes and its report.
 *
 *   closed  so many connections, each with one request after another
 *   open    so many requests a second at times fixed beforehand; a late answer delays no other request, and latency
 *           counts from the time a request was due, not from when it could be sent (no coordinated omission)
 *   hold    so many requests at once, each on its own connection, once; prints {"sent":N} when all are sent and ends
 *           when all are answered or its standard input ends
 *
 * One JSON object on standard output at the end. CPU time of the watched processes is read at both ends of the window.
 */
#include "load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

struct options options = {
    .connections = 32,
    .warm_ns = NS_PER_S / 2,
    .window_ns = 3 * NS_PER_S,
    .method = "POST",
    .path = "/v1/completions",
    .extra = "",
    .body = 2048,
    .wish = "bench n=16 us=0 size=1024 delay=0 hold=0",
};
struct tally tally;
char *request;
size_t request_len;
bool counting;
uint64_t open_requests;

static struct conn *conns;
static unsigned opened;         /* of conns, how many were ever used */
static struct conn *idle;       /* open mode: connections without a request */
static uint64_t *waiting;       /* open mode: due times of requests that wait for a connection */
static size_t waiting_len;
static size_t waiting_from;
static size_t waiting_cap;
static uint64_t started_count;
static uint64_t finished_count;
static bool stop;

static void build_request(void) {
    char *body = must_alloc(options.body + 512);
    size_t len = 0;
    if (options.body) {
        char front[512];
        int size = snprintf(front, sizeof front,
                            "{\"model\":\"bench\",\"max_tokens\":16,\"stream\":%s,\"user\":\"%s\",\"prompt\":\"",
                            options.stream ? "true" : "false", options.wish);
        len = (size_t)size + 2 > options.body ? (size_t)size + 2 : options.body;
        body = must_grow(body, len + 1);
        memset(body, 'p', len);
        memcpy(body, front, (size_t)size);
        memcpy(body + len - 2, "\"}", 2);
    }
    request = must_alloc(len + 4096);
    int head = snprintf(request, 4096, "%s %s HTTP/1.1\r\nHost: 127.0.0.1:%u\r\nUser-Agent: bench\r\nAccept: */*\r\n%s",
                        options.method, options.path, options.port, options.extra);
    if (len)
        head += snprintf(request + head, 128, "Content-Type: application/json\r\nContent-Length: %zu\r\n", len);
    else if (strcmp(options.method, "POST") == 0)
        head += snprintf(request + head, 128, "Content-Length: 0\r\n");
    head += snprintf(request + head, 8, "\r\n");
    memcpy(request + head, body, len);
    request_len = (size_t)head + len;
    free(body);
}

void request_over(struct conn *c) {
    finished_count++;
    if (options.mode == HOLD || stop) return;
    if (options.mode == CLOSED) {
        if (options.count && started_count >= options.count) {
            if (finished_count >= started_count) stop = true;
            return;
        }
        if (c->fd < 0 && tally.refused > 1000) {
            stop = true;
            return;
        }
        started_count++;
        conn_start(c, now_ns());
        return;
    }
    if (waiting_from < waiting_len) {
        conn_start(c, waiting[waiting_from++]);
        return;
    }
    waiting_from = waiting_len = 0;
    c->next_idle = idle;
    idle = c;
}

static void due(uint64_t when) {
    started_count++;
    struct conn *c = idle;
    if (c) {
        idle = c->next_idle;
        conn_start(c, when);
    } else if (opened < options.connections) {
        conn_start(&conns[opened++], when);
    } else {
        if (counting) tally.late++;
        if (waiting_len == waiting_cap) {
            waiting_cap = waiting_cap ? 2 * waiting_cap : 1024;
            waiting = must_grow(waiting, waiting_cap * sizeof *waiting);
        }
        waiting[waiting_len++] = when;
    }
}

/* Waits until the time given or until something happened, and handles what happened. */
static void turn(uint64_t until) {
    struct epoll_event events[512];
    uint64_t now = now_ns();
    uint64_t wait = until > now ? until - now : 0;
    struct timespec limit = {.tv_sec = (time_t)(wait / NS_PER_S), .tv_nsec = (long)(wait % NS_PER_S)};
    int count = epoll_pwait2(conn_epoll(), events, 512, &limit, NULL);
    if (count < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == NULL) {
            char ignored[64];
            if (read(STDIN_FILENO, ignored, sizeof ignored) <= 0) stop = true;
        } else {
            conn_ready(events[i].data.ptr, events[i].events);
        }
    }
}

static struct cpu_time cpu_before;
static struct cpu_time cpu_after;
static uint64_t window_from;
static uint64_t window_to;

static void open_window(void) {
    counting = true;
    cpu_before = cpu_time_of(options.pids, options.pid_count);
    window_from = now_ns();
}

static void close_window(void) {
    window_to = now_ns();
    cpu_after = cpu_time_of(options.pids, options.pid_count);
    counting = false;
}

static uint64_t soonest(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void run_closed_or_open(void) {
    uint64_t begin = now_ns();
    uint64_t from = begin + options.warm_ns;
    uint64_t to = options.count ? UINT64_MAX / 2 : from + options.window_ns;
    uint64_t step = options.mode == OPEN ? (uint64_t)((double)NS_PER_S / options.rate)
                                         : options.ramp_ns / (options.connections ? options.connections : 1);
    uint64_t next = begin;
    bool opening = options.warm_ns == 0;
    if (opening) open_window();
    while (!stop) {
        uint64_t now = now_ns();
        if (!opening && now >= from) {
            opening = true;
            open_window();
        }
        if (now >= to) break;
        bool more = options.mode == OPEN || opened < options.connections;
        while (more && next <= now) {
            if (options.mode == OPEN) {
                due(next);
            } else {
                started_count++;
                conn_start(&conns[opened++], now);
                more = opened < options.connections && !(options.count && started_count >= options.count);
            }
            next += step;
        }
        if (options.count && started_count >= options.count) more = false;
        turn(soonest(more ? next : UINT64_MAX, soonest(opening ? to : from, now + NS_PER_S)));
    }
    close_window();
}

/* Requests begin in a window of so many at once, so that the listener's backlog is never the limit. */
#define HOLD_BURST 256

static void run_hold(void) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(conn_epoll(), EPOLL_CTL_ADD, STDIN_FILENO, &event);
    open_window();
    unsigned sent = 0;
    bool told = false;
    while (!stop) {
        while (opened < options.connections && opened - sent < HOLD_BURST) conn_start(&conns[opened++], now_ns());
        turn(now_ns() + NS_PER_S / 100);
        if (!told) {
            sent = 0;
            for (unsigned i = 0; i < opened; i++)
                if (conns[i].state != CONNECTING && (conns[i].sent == request_len || conns[i].fd < 0)) sent++;
            if (sent == options.connections) {
                told = true;
                printf("{\"sent\":%u}\n", sent);
                fflush(stdout);
            }
        }
        if (told && open_requests == 0) break;
    }
    close_window();
}

static void report(void) {
    double seconds = (double)(window_to - window_from) / (double)NS_PER_S;
    double tick_ns = (double)NS_PER_S / (double)sysconf(_SC_CLK_TCK);
    printf("{\"seconds\":%.6f,\"answers\":%llu,\"events\":%llu,\"bytes\":%llu,\"late\":%llu,\"stale\":%llu,", seconds,
           (unsigned long long)tally.answers, (unsigned long long)tally.events, (unsigned long long)tally.bytes,
           (unsigned long long)tally.late, (unsigned long long)tally.stale);
    printf("\"status\":{");
    const char *comma = "";
    for (int i = 0; i < 6; i++) {
        if (tally.status[i] == 0) continue;
        printf("%s\"%dxx\":%llu", comma, i, (unsigned long long)tally.status[i]);
        comma = ",";
    }
    uint64_t bad = tally.cut + tally.refused + tally.unfinished;
    for (int i = 0; i < 6; i++) bad += i == 2 ? 0 : tally.status[i];
    printf("},\"cut\":%llu,\"refused\":%llu,\"unfinished\":%llu,\"errors\":%llu,\"unanswered\":%llu,",
           (unsigned long long)tally.cut, (unsigned long long)tally.refused, (unsigned long long)tally.unfinished,
           (unsigned long long)bad, (unsigned long long)open_requests);
    printf("\"cpu_ns\":%llu,\"waited_ns\":%llu,\"user_ns\":%.0f,\"kernel_ns\":%.0f,",
           (unsigned long long)(cpu_after.total_ns - cpu_before.total_ns),
           (unsigned long long)(cpu_after.waited_ns - cpu_before.waited_ns),
           (double)(cpu_after.user_ticks - cpu_before.user_ticks) * tick_ns,
           (double)(cpu_after.kernel_ticks - cpu_before.kernel_ticks) * tick_ns);
    printf("\"latency_us\":");
    hist_print(stdout, &tally.latency);
    printf(",\"first_byte_us\":");
    hist_print(stdout, &tally.first_byte);
    printf(",\"event_delay_us\":");
    hist_print(stdout, &tally.event_delay);
    printf("}\n");
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--stream") == 0) {
            options.stream = true;
            continue;
        }
        if (strcmp(name, "--fresh") == 0) {
            options.fresh = true;
            continue;
        }
        if (++i == argc) die("%s wants a value", name);
        const char *value = argv[i];
        double number = atof(value);
        if (strcmp(name, "--mode") == 0)
            options.mode = strcmp(value, "open") == 0 ? OPEN : strcmp(value, "hold") == 0 ? HOLD : CLOSED;
        else if (strcmp(name, "--port") == 0)
            options.port = (uint16_t)number;
        else if (strcmp(name, "--connections") == 0)
            options.connections = (unsigned)number;
        else if (strcmp(name, "--rate") == 0)
            options.rate = number;
        else if (strcmp(name, "--warm") == 0)
            options.warm_ns = (uint64_t)(number * (double)NS_PER_S);
        else if (strcmp(name, "--seconds") == 0)
            options.window_ns = (uint64_t)(number * (double)NS_PER_S);
        else if (strcmp(name, "--ramp") == 0)
            options.ramp_ns = (uint64_t)(number * (double)NS_PER_S);
        else if (strcmp(name, "--count") == 0)
            options.count = (uint64_t)number;
        else if (strcmp(name, "--method") == 0)
            options.method = value;
        else if (strcmp(name, "--path") == 0)
            options.path = value;
        else if (strcmp(name, "--wish") == 0)
            options.wish = value;
        else if (strcmp(name, "--body") == 0)
            options.body = (size_t)number;
        else if (strcmp(name, "--watch") == 0)
            options.pid_count = parse_pids(value, options.pids, MAX_WATCHED);
        else
            die("unknown option %s", name);
    }
    if (options.port == 0) die("--port is missing");
    if (options.mode == OPEN && options.rate <= 0) die("open mode wants --rate");
}

int main(int argc, char **argv) {
    parse(argc, argv);
    prctl(PR_SET_TIMERSLACK, 1UL);
    conn_epoll();
    build_request();
    conns = must_alloc(options.connections * sizeof *conns);
    for (unsigned i = 0; i < options.connections; i++) conns[i].fd = -1;
    if (options.mode == HOLD)
        run_hold();
    else
        run_closed_or_open();
    report();
    return 0;
}
