#include "mock.h"

#include <stdlib.h>

static struct conn **heap;
static size_t count;
static size_t cap;

static void put(size_t at, struct conn *c) {
    heap[at] = c;
    c->heap_at = at + 1;
}

static void up(size_t at, struct conn *c) {
    while (at > 0) {
        size_t parent = (at - 1) / 2;
        if (heap[parent]->due <= c->due) break;
        put(at, heap[parent]);
        at = parent;
    }
    put(at, c);
}

static void down(size_t at, struct conn *c) {
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && heap[child + 1]->due < heap[child]->due) child++;
        if (c->due <= heap[child]->due) break;
        put(at, heap[child]);
        at = child;
    }
    put(at, c);
}

void timer_drop(struct conn *c) {
    if (c->heap_at == 0) return;
    size_t at = c->heap_at - 1;
    c->heap_at = 0;
    struct conn *moved = heap[--count];
    if (moved == c) return;
    if (at > 0 && heap[(at - 1) / 2]->due > moved->due)
        up(at, moved);
    else
        down(at, moved);
}

void timer_set(struct conn *c, uint64_t due) {
    timer_drop(c);
    c->due = due;
    if (count == cap) {
        cap = cap ? 2 * cap : 1024;
        heap = must_grow(heap, cap * sizeof *heap);
    }
    up(count++, c);
}

struct conn *timer_pop(uint64_t now) {
    if (count == 0 || heap[0]->due > now) return NULL;
    struct conn *c = heap[0];
    timer_drop(c);
    return c;
}

uint64_t timer_next(void) { return count ? heap[0]->due : UINT64_MAX; }
