/* The mock engines' main loop: one thread, many listeners, epoll.
 *
 * Prints {"ports":[...]} when it listens and runs until its standard input ends. */
#include "mock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct engine engines[MAX_ENGINES];
struct options options = {.engines = 2};
struct list flat;
struct list held;
uint64_t last_arrival;
uint64_t first_arrival;

static int epoll_fd;
static char input[1 << 18];
/* Connections that closed in this turn of the loop; later events of the same turn may still name them. */
static struct list dead;

void list_add(struct list *list, struct conn *c) {
    if (list->count == list->cap) {
        list->cap = list->cap ? 2 * list->cap : 256;
        list->item = must_grow(list->item, (size_t)list->cap * sizeof(struct conn *));
    }
    c->list_at = list->count;
    list->item[list->count++] = c;
}

void list_remove(struct list *list, struct conn *c) {
    if (c->list_at < 0 || c->list_at >= list->count || list->item[c->list_at] != c) return;
    struct conn *moved = list->item[--list->count];
    list->item[c->list_at] = moved;
    moved->list_at = c->list_at;
    c->list_at = -1;
}

static void watch(struct conn *c, bool writable) {
    if (c->polled_out == writable) return;
    c->polled_out = writable;
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void drop(struct conn *c) {
    if (c->fd < 0) return;
    close(c->fd);
    c->fd = -1;
    if (c->busy && c->generation) {
        c->engine->aborted++;
        c->engine->open--;
    }
    timer_drop(c);
    list_remove(&flat, c);
    list_remove(&held, c);
    list_add(&dead, c);
}

static void flush(struct conn *c) {
    while (c->out_len) {
        ssize_t sent = send(c->fd, c->out, c->out_len, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) break;
            drop(c);
            return;
        }
        c->out += sent;
        c->out_len -= (size_t)sent;
    }
    watch(c, c->out_len > 0);
}

void send_shared(struct conn *c, const char *data, size_t len) {
    if (c->fd < 0) return;
    if (c->out_len) {
        send_copy(c, data, len);
        return;
    }
    c->out = data;
    c->out_len = len;
    flush(c);
}

void send_copy(struct conn *c, const char *data, size_t len) {
    if (c->fd < 0) return;
    if (c->out_len == 0) {
        ssize_t sent = send(c->fd, data, len, MSG_NOSIGNAL);
        if (sent == (ssize_t)len) return;
        if (sent < 0 && errno != EAGAIN) {
            drop(c);
            return;
        }
        if (sent > 0) {
            data += sent;
            len -= (size_t)sent;
        }
    }
    if (c->own_cap < c->out_len + len) {
        bool inside = c->out >= c->own && c->out < c->own + c->own_cap && c->out_len;
        size_t at = inside ? (size_t)(c->out - c->own) : 0;
        c->own_cap = at + c->out_len + len + 4096;
        c->own = must_grow(c->own, c->own_cap);
        if (inside) c->out = c->own + at;
    }
    memmove(c->own, c->out, c->out_len);
    memcpy(c->own + c->out_len, data, len);
    c->out = c->own;
    c->out_len += len;
    watch(c, true);
}

void answered(struct conn *c) {
    if (c->fd < 0) return;
    c->busy = false;
    c->head_len = 0;
    if (c->generation) c->engine->open--;
    c->generation = false;
    if (!c->keep_alive && c->out_len == 0) drop(c);
}

static void accept_all(struct engine *engine) {
    for (;;) {
        int fd = accept4(engine->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno != EAGAIN && errno != ECONNABORTED && errno != EMFILE) die("accept");
            if (errno == EMFILE) fprintf(stderr, "the mock is out of file descriptors\n");
            return;
        }
        no_delay(fd);
        struct conn *c = must_alloc(sizeof *c);
        c->fd = fd;
        c->engine = engine;
        c->list_at = -1;
        engine->accepted++;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll_ctl");
    }
}

static void readable(struct conn *c) {
    ssize_t got = recv(c->fd, input, sizeof input, 0);
    if (got > 0)
        take_input(c, input, (size_t)got);
    else if (got == 0 || errno != EAGAIN)
        drop(c);
}

static bool is_listener(void *pointer) {
    return pointer >= (void *)engines && pointer < (void *)(engines + MAX_ENGINES);
}

static void free_dead(void) {
    for (int i = 0; i < dead.count; i++) {
        free(dead.item[i]->head);
        free(dead.item[i]->own);
        free(dead.item[i]);
    }
    dead.count = 0;
}

/* Every flat-out stream writes one event a turn, so that streams stay abreast and each event is its own write. */
static void write_flat(void) {
    for (int i = flat.count - 1; i >= 0; i--) {
        if (i >= flat.count) continue;
        struct conn *c = flat.item[i];
        if (c->out_len == 0) emit_event(c);
    }
}

static bool flat_ready(void) {
    for (int i = 0; i < flat.count; i++)
        if (flat.item[i]->out_len == 0) return true;
    return false;
}

static void loop(void) {
    struct epoll_event events[256];
    for (;;) {
        uint64_t now = now_ns();
        uint64_t next = timer_next();
        uint64_t wait = flat_ready() || next <= now ? 0 : next == UINT64_MAX ? 10 * NS_PER_S : next - now;
        struct timespec limit = {.tv_sec = (time_t)(wait / NS_PER_S), .tv_nsec = (long)(wait % NS_PER_S)};
        int count = epoll_pwait2(epoll_fd, events, 256, &limit, NULL);
        if (count < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < count; i++) {
            void *pointer = events[i].data.ptr;
            if (pointer == NULL) {
                if (read(STDIN_FILENO, input, sizeof input) <= 0) return;
                continue;
            }
            if (is_listener(pointer)) {
                accept_all(pointer);
                continue;
            }
            struct conn *c = pointer;
            if (c->fd >= 0 && events[i].events & EPOLLOUT) {
                flush(c);
                if (c->fd >= 0 && c->out_len == 0 && !c->busy && !c->keep_alive) drop(c);
            }
            if (c->fd >= 0 && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
        now = now_ns();
        for (struct conn *c; (c = timer_pop(now)) != NULL;) due_now(c);
        write_flat();
        free_dead();
    }
}

static void parse(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        uint64_t value = strtoull(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--engines") == 0)
            options.engines = (unsigned)value;
        else if (strcmp(argv[i], "--control-us") == 0)
            options.control_ns = value * NS_PER_US;
        else if (strcmp(argv[i], "--delay-us") == 0)
            options.default_delay_ns = value * NS_PER_US;
        else
            die("usage: mock [--engines N] [--control-us N] [--delay-us N]");
    }
    if (options.engines < 1 || options.engines > MAX_ENGINES) die("--engines takes 1 to %d", MAX_ENGINES);
}

int main(int argc, char **argv) {
    parse(argc, argv);
    prctl(PR_SET_TIMERSLACK, 1UL);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    prepare_answers();
    printf("{\"ports\":[");
    for (unsigned i = 0; i < options.engines; i++) {
        struct engine *engine = &engines[i];
        engine->index = i;
        strcpy(engine->version, "default");
        engine->listener = listen_local(&engine->port);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = engine};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, engine->listener, &event);
        printf("%s%u", i ? "," : "", engine->port);
    }
    printf("]}\n");
    fflush(stdout);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, STDIN_FILENO, &event) < 0) die("standard input cannot be watched");
    loop();
    return 0;
}
