/* One client connection: sends the request, reads the answer, tells a whole answer from a cut one. */
#include "load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static int epoll_fd = -1;
static char input[1 << 18];

int conn_epoll(void) {
    if (epoll_fd < 0) epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd;
}

static void watch(struct conn *c, int operation, bool writable) {
    c->want_write = writable;
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll_fd, operation, c->fd, &event) < 0) die("epoll_ctl");
}

void conn_drop(struct conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->state = IDLE;
    c->reused = false;
}

static void failed(struct conn *c, uint64_t *counter) {
    if (counting || options.mode == HOLD) (*counter)++;
    conn_drop(c);
    open_requests--;
    request_over(c);
}

static void open_connection(struct conn *c) {
    c->fd = connect_local(options.port);
    if (c->fd < 0) {
        failed(c, &tally.refused);
        return;
    }
    c->state = CONNECTING;
    watch(c, EPOLL_CTL_ADD, true);
}

static void send_more(struct conn *c) {
    while (c->sent < request_len) {
        ssize_t sent = send(c->fd, request + c->sent, request_len - c->sent, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) return; /* what was wrong shows when it is read */
        c->sent += (size_t)sent;
    }
    bool more = c->sent < request_len;
    if (more != c->want_write) watch(c, EPOLL_CTL_MOD, more);
}

static void begin_sending(struct conn *c) {
    c->state = HEAD;
    c->sent = 0;
    c->head_len = 0;
    c->event_len = 0;
    c->done_seen = false;
    c->events = false;
    send_more(c);
}

void conn_start(struct conn *c, uint64_t due) {
    c->begun = due;
    open_requests++;
    if (c->fd >= 0)
        begin_sending(c);
    else
        open_connection(c);
}

static void whole(struct conn *c, uint64_t now) {
    if (counting || options.mode == HOLD) {
        tally.status[c->status / 100 < 6 ? c->status / 100 : 0]++;
        if (c->status / 100 == 2) {
            tally.answers++;
            hist_add(&tally.latency, now - c->begun);
        }
        if (c->events && !c->done_seen) tally.unfinished++;
    }
    c->state = IDLE;
    c->reused = true;
    if (c->close_after || options.fresh) conn_drop(c);
    open_requests--;
    request_over(c);
}

static void take_event(struct conn *c, uint64_t now) {
    c->event[c->event_len] = '\0';
    if (strncmp(c->event, "data: [DONE]", 12) == 0) {
        c->done_seen = true;
        return;
    }
    const char *stamp = strstr(c->event, "t=");
    if (stamp == NULL) return;
    uint64_t made = strtoull(stamp + 2, NULL, 10);
    if (counting) {
        tally.events++;
        if (now > made) hist_add(&tally.event_delay, now - made);
    }
}

static void body(struct conn *c, const char *data, size_t len, uint64_t now) {
    if (counting) tally.bytes += len;
    if (!c->events) return;
    while (len) {
        const char *line_end = memchr(data, '\n', len);
        size_t take = line_end ? (size_t)(line_end - data) + 1 : len;
        size_t room = EVENT_LIMIT - 1 - c->event_len;
        size_t kept = take < room ? take : room;
        memcpy(c->event + c->event_len, data, kept);
        c->event_len += kept;
        if (line_end) {
            if (c->event_len > 1) take_event(c, now);
            c->event_len = 0;
        }
        data += take;
        len -= take;
    }
}

static const char *header(const char *head, const char *name) {
    size_t size = strlen(name);
    for (const char *line = strchr(head, '\n'); line; line = strchr(line, '\n')) {
        line++;
        if (strncasecmp(line, name, size) == 0 && line[size] == ':') {
            line += size + 1;
            while (*line == ' ') line++;
            return line;
        }
    }
    return NULL;
}

static void read_head(struct conn *c, uint64_t now) {
    c->head[c->head_len] = '\0';
    c->status = atoi(c->head + 9);
    const char *value = header(c->head, "connection");
    c->close_after = value && strncasecmp(value, "close", 5) == 0;
    value = header(c->head, "content-type");
    c->events = value && strncasecmp(value, "text/event-stream", 17) == 0;
    if (c->events && c->event == NULL) c->event = must_alloc(EVENT_LIMIT);
    if (counting || options.mode == HOLD) hist_add(&tally.first_byte, now - c->begun);
    value = header(c->head, "transfer-encoding");
    if (value) {
        c->state = CHUNK_SIZE;
        c->left = c->line_len = 0;
        return;
    }
    value = header(c->head, "content-length");
    c->state = value ? BODY : UNTIL_CLOSE;
    c->left = value ? strtoull(value, NULL, 10) : 0;
    if (c->status == 204 || c->status == 304) {
        c->state = BODY;
        c->left = 0;
    }
}

static size_t take_head(struct conn *c, const char *data, size_t len, uint64_t now) {
    if (c->head == NULL) c->head = must_alloc(ANSWER_HEAD_LIMIT + 1);
    size_t before = c->head_len;
    size_t room = ANSWER_HEAD_LIMIT - before;
    size_t take = len < room ? len : room;
    memcpy(c->head + before, data, take);
    size_t from = before > 3 ? before - 3 : 0;
    char *found = memmem(c->head + from, before + take - from, "\r\n\r\n", 4);
    if (found == NULL) {
        c->head_len = before + take;
        if (take == 0) die("an answer's head is over %d bytes", ANSWER_HEAD_LIMIT);
        return take;
    }
    c->head_len = (size_t)(found - c->head) + 4;
    size_t used = c->head_len - before;
    read_head(c, now);
    return used;
}

/* Chunk sizes, the line ends after chunks, trailers. True if the answer is over. */
static bool take_line(struct conn *c, const char *data, size_t len, size_t *used) {
    for (size_t i = 0; i < len; i++) {
        unsigned char ch = (unsigned char)data[i];
        if (ch != '\n') {
            if (ch == '\r') continue;
            if (c->state == CHUNK_SIZE) c->left = c->left * 16 + hex_digit(ch);
            c->line_len++;
            continue;
        }
        *used = i + 1;
        bool empty = c->line_len == 0;
        c->line_len = 0;
        if (c->state == CHUNK_SIZE) {
            c->state = c->left ? CHUNK : TRAILER;
            return false;
        }
        if (c->state == CHUNK_END) {
            c->state = CHUNK_SIZE;
            c->left = 0;
            return false;
        }
        if (empty) return true;
    }
    *used = len;
    return false;
}

static void take(struct conn *c, const char *data, size_t len, uint64_t now) {
    for (;;) {
        if (c->state == BODY && c->left == 0) {
            whole(c, now);
            return;
        }
        if (len == 0) return;
        size_t used = len;
        switch (c->state) {
        case HEAD: used = take_head(c, data, len, now); break;
        case UNTIL_CLOSE: body(c, data, len, now); break;
        case BODY:
        case CHUNK:
            used = len < c->left ? len : c->left;
            body(c, data, used, now);
            c->left -= used;
            if (c->left == 0 && c->state == CHUNK) c->state = CHUNK_END;
            break;
        case CHUNK_SIZE:
        case CHUNK_END:
        case TRAILER:
            if (take_line(c, data, len, &used)) {
                whole(c, now);
                return;
            }
            break;
        default: return; /* bytes that nobody asked for */
        }
        data += used;
        len -= used;
    }
}

static void ended(struct conn *c, uint64_t now) {
    switch (c->state) {
    case IDLE: conn_drop(c); return;
    case CONNECTING: failed(c, &tally.refused); return;
    case UNTIL_CLOSE:
        c->close_after = true;
        whole(c, now);
        return;
    case HEAD:
        if (c->reused && c->head_len == 0) {
            /* A kept connection may be closed by its server at any time; clients send again. */
            if (counting) tally.stale++;
            conn_drop(c);
            open_connection(c);
            return;
        }
        /* fall through */
    default: failed(c, &tally.cut); return;
    }
}

void conn_ready(struct conn *c, unsigned events) {
    if (c->fd < 0) return;
    if (c->state == CONNECTING) {
        if (events & (EPOLLERR | EPOLLHUP)) {
            failed(c, &tally.refused);
            return;
        }
        if (events & EPOLLOUT) begin_sending(c);
        return;
    }
    if (events & EPOLLOUT && c->state == HEAD) send_more(c);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t got = recv(c->fd, input, sizeof input, 0);
        if (got > 0)
            take(c, input, (size_t)got, now_ns());
        else if (got == 0 || errno != EAGAIN)
            ended(c, now_ns());
    }
}
