/* A mock of many vLLM servers in one process: what a connection is, and who does what with it. */
#ifndef BENCH_MOCK_H
#define BENCH_MOCK_H

#include "common.h"

#define HEAD_LIMIT 32768
/* Bytes of the start and of the end of a body that are kept: the wishes of a request (struct wish) are in one of them,
 * wherever a router that writes the JSON anew puts the field. */
#define BODY_KEPT 2048
#define MAX_ENGINES 256

enum reading { READ_HEAD, READ_BODY, READ_CHUNK_SIZE, READ_CHUNK, READ_CHUNK_END, READ_TRAILER };

/* What a generation request asks the mock to do. It stands in the OpenAI field "user", which every router passes on:
 * "bench n=100 us=20000 size=1024 delay=0 hold=0". */
struct wish {
    unsigned events;      /* of a stream */
    uint64_t interval_ns; /* between two events; 0: as fast as the socket takes them */
    size_t size;          /* bytes of the body of an answer that is no stream */
    uint64_t delay_ns;    /* before the answer */
    bool hold;            /* answer only when released */
    bool stream;
};

struct engine {
    int listener;
    uint16_t port;
    unsigned index;
    bool paused;
    char version[64];
    uint64_t requests; /* generation requests */
    uint64_t open;     /* of them, those not yet answered whole */
    uint64_t aborted;  /* of them, those whose connection closed before the answer was whole */
    uint64_t calls;    /* control calls */
    uint64_t accepted; /* connections */
};

struct conn {
    int fd;
    struct engine *engine;
    /* The request that is being read. */
    enum reading reading;
    char *head;
    size_t head_len;
    size_t body_left;
    size_t body_len;
    size_t line_len;
    bool last_chunk;
    bool keep_alive;
    bool wants_continue;
    char first[BODY_KEPT];
    char last[2 * BODY_KEPT];
    size_t last_len;
    /* The answer. */
    bool busy; /* a request is being answered; what arrives meanwhile waits in head */
    bool generation;
    struct wish wish;
    unsigned events_left;
    uint64_t due;    /* time of the next event or of the answer */
    size_t heap_at;  /* place in the timer heap + 1; 0: not there */
    int list_at;     /* place among the flat-out streams or the held requests; -1: in none */
    char *own;       /* bytes that wait for the socket, in memory of this connection */
    size_t own_cap;
    const char *out; /* what is still to be written: in own or in a shared answer */
    size_t out_len;
    bool polled_out;
};

struct options {
    unsigned engines;
    uint64_t control_ns; /* how long a control call takes */
    uint64_t default_delay_ns;
};

struct list {
    struct conn **item;
    int count;
    int cap;
};

extern struct engine engines[MAX_ENGINES];
extern struct options options;
extern struct list flat; /* streams with an event to write now */
extern struct list held; /* requests that wait for a release */
extern uint64_t last_arrival; /* of a generation request at any engine */
extern uint64_t first_arrival;

void list_add(struct list *list, struct conn *c);
void list_remove(struct list *list, struct conn *c);

/* mock_timer.c: connections by the time of what is due. */
void timer_set(struct conn *c, uint64_t due);
void timer_drop(struct conn *c);
/* The connection whose time has come, taken out, or NULL. */
struct conn *timer_pop(uint64_t now);
uint64_t timer_next(void); /* UINT64_MAX if nothing is due */

/* mock_http.c */
void take_input(struct conn *c, const char *data, size_t len);
/* Case-blind search for "name:" at a line start of the head; returns the value (up to the line's end) or NULL. */
const char *field(const struct conn *c, const char *name, size_t *len);

/* mock.c */
void send_shared(struct conn *c, const char *data, size_t len); /* the bytes stay valid for ever */
void send_copy(struct conn *c, const char *data, size_t len);
void answered(struct conn *c); /* the answer has been handed over whole */

/* mock_answers.c */
void handle(struct conn *c);    /* a request is whole */
void due_now(struct conn *c);   /* its time has come */
void emit_event(struct conn *c); /* the next event of a stream */
void prepare_answers(void);

#endif
