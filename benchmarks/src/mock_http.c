/* Reads requests: enough of HTTP/1.1 for what proxies send (Content-Length and chunked bodies, Expect). */
#include "mock.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *field(const struct conn *c, const char *name, size_t *len) {
    size_t size = strlen(name);
    const char *end = c->head + c->head_len;
    const char *line = c->head;
    while ((line = memchr(line, '\n', (size_t)(end - line))) != NULL) {
        line++;
        if ((size_t)(end - line) <= size) return NULL;
        if (line[size] == ':' && strncasecmp(line, name, size) == 0) {
            const char *value = line + size + 1;
            while (*value == ' ') value++;
            const char *stop = memchr(value, '\r', (size_t)(end - value));
            *len = stop ? (size_t)(stop - value) : (size_t)(end - value);
            return value;
        }
    }
    return NULL;
}

static void keep_body(struct conn *c, const char *data, size_t len) {
    if (c->body_len < BODY_KEPT) {
        size_t room = BODY_KEPT - c->body_len;
        memcpy(c->first + c->body_len, data, len < room ? len : room);
    }
    c->body_len += len;
    if (len >= BODY_KEPT) {
        memcpy(c->last, data + len - BODY_KEPT, BODY_KEPT);
        c->last_len = BODY_KEPT;
        return;
    }
    if (c->last_len + len > sizeof c->last) {
        memmove(c->last, c->last + c->last_len - BODY_KEPT, BODY_KEPT);
        c->last_len = BODY_KEPT;
    }
    memcpy(c->last + c->last_len, data, len);
    c->last_len += len;
}

static void begin_body(struct conn *c) {
    size_t len;
    const char *value = field(c, "connection", &len);
    c->keep_alive = !(value && len == 5 && strncasecmp(value, "close", 5) == 0);
    c->body_len = c->last_len = c->body_left = 0;
    c->last_chunk = false;
    value = field(c, "expect", &len);
    if (value) send_copy(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    value = field(c, "transfer-encoding", &len);
    if (value) {
        c->reading = READ_CHUNK_SIZE;
        c->line_len = 0;
        return;
    }
    value = field(c, "content-length", &len);
    c->body_left = value ? strtoull(value, NULL, 10) : 0;
    c->reading = READ_BODY;
}

static void request_whole(struct conn *c) {
    c->reading = READ_HEAD;
    c->busy = true;
    handle(c);
}

/* The end of the head within the bytes that are there, or 0. Looks only at what is new. */
static size_t head_end(const char *head, size_t from, size_t len) {
    from = from > 3 ? from - 3 : 0;
    const char *found = memmem(head + from, len - from, "\r\n\r\n", 4);
    return found ? (size_t)(found - head) + 4 : 0;
}

static size_t take_head(struct conn *c, const char *data, size_t len) {
    if (c->head == NULL) c->head = must_alloc(HEAD_LIMIT);
    size_t room = HEAD_LIMIT - c->head_len;
    size_t take = len < room ? len : room;
    memcpy(c->head + c->head_len, data, take);
    size_t before = c->head_len;
    size_t end = head_end(c->head, before, before + take);
    if (end == 0) {
        c->head_len += take;
        if (c->head_len == HEAD_LIMIT) die("a request head is over %d bytes", HEAD_LIMIT);
        return take;
    }
    c->head_len = end;
    begin_body(c);
    return end - before;
}

static size_t take_line(struct conn *c, const char *data, size_t len) {
    for (size_t i = 0; i < len; i++) {
        if (data[i] != '\n') {
            unsigned char ch = (unsigned char)data[i];
            if (c->reading == READ_CHUNK_SIZE && ch != '\r') {
                unsigned digit = hex_digit(ch);
                if (digit < 16) c->body_left = c->body_left * 16 + digit;
            }
            if (ch != '\r') c->line_len++;
            continue;
        }
        bool empty = c->line_len == 0;
        c->line_len = 0;
        if (c->reading == READ_CHUNK_SIZE) {
            c->reading = c->body_left ? READ_CHUNK : READ_TRAILER;
        } else if (c->reading == READ_CHUNK_END) {
            c->reading = READ_CHUNK_SIZE;
            c->body_left = 0;
        } else if (empty) {
            c->last_chunk = true;
        }
        return i + 1;
    }
    return len;
}

void take_input(struct conn *c, const char *data, size_t len) {
    while (c->fd >= 0) {
        if (c->reading == READ_BODY && c->body_left == 0) {
            request_whole(c);
            continue;
        }
        if (c->busy) {
            if (len) die("a request came before the answer of the one before it (%zu bytes)", len);
            return;
        }
        if (len == 0) return;
        size_t used;
        switch (c->reading) {
        case READ_HEAD: used = take_head(c, data, len); break;
        case READ_BODY:
        case READ_CHUNK:
            used = len < c->body_left ? len : c->body_left;
            keep_body(c, data, used);
            c->body_left -= used;
            if (c->body_left == 0 && c->reading == READ_CHUNK) c->reading = READ_CHUNK_END;
            break;
        default: used = take_line(c, data, len); break;
        }
        data += used;
        len -= used;
        if (c->last_chunk) {
            c->last_chunk = false;
            request_whole(c);
        }
    }
}
