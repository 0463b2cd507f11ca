/* The load generator: what a connection is, and who does what with it. */
#ifndef BENCH_LOAD_H
#define BENCH_LOAD_H

#include "common.h"

#define ANSWER_HEAD_LIMIT 16384
#define EVENT_LIMIT 4096

enum mode { CLOSED, OPEN, HOLD };

struct options {
    enum mode mode;
    uint16_t port;
    unsigned connections;  /* at once; in open mode the most that are opened */
    double rate;           /* requests a second (open mode) */
    uint64_t warm_ns;      /* before the window that counts */
    uint64_t window_ns;    /* that counts */
    uint64_t count;        /* stop after so many requests instead (closed mode) */
    bool fresh;            /* a new connection for each request */
    const char *method;
    const char *path;
    const char *extra;     /* further header lines, each ending in \r\n */
    const char *wish;      /* see mock.h */
    size_t body;           /* bytes of the request body; 0: none at all */
    bool stream;
    uint64_t ramp_ns;      /* time over which the connections begin */
    int pids[MAX_WATCHED]; /* whose CPU time is taken over the window */
    int pid_count;
};

enum state { IDLE, CONNECTING, SENDING, HEAD, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER, UNTIL_CLOSE };

struct conn {
    int fd;
    enum state state;
    bool reused;      /* a request was answered on it before */
    bool want_write;
    size_t sent;
    uint64_t begun;   /* when the request was due */
    char *head;
    size_t head_len;
    int status;
    bool close_after;
    uint64_t left;
    size_t line_len;
    bool events;      /* the answer is an event stream */
    bool done_seen;
    char *event;
    size_t event_len;
    struct conn *next_idle;
};

struct tally {
    uint64_t answers;         /* whole, with a status of 2xx */
    uint64_t status[6];       /* whole answers by the first digit of their status */
    uint64_t cut;             /* connections that ended inside an answer or before it */
    uint64_t refused;         /* connections that could not be opened */
    uint64_t unfinished;      /* streams that ended well in HTTP but without [DONE] */
    uint64_t stale;           /* kept connections found closed before an answer; sent again on a new one */
    uint64_t events;
    uint64_t bytes;
    uint64_t late;            /* requests that had to wait for a connection (open mode) */
    struct hist latency;      /* from when the request was due until its last byte */
    struct hist first_byte;
    struct hist event_delay;  /* from the mock's write to our read */
};

extern struct options options;
extern struct tally tally;
extern char *request;
extern size_t request_len;
extern bool counting; /* inside the window */
extern uint64_t open_requests;

/* load_conn.c */
void conn_start(struct conn *c, uint64_t due); /* begin a request, on the connection it has or on a new one */
void conn_ready(struct conn *c, unsigned events); /* what epoll said */
void conn_drop(struct conn *c);
int conn_epoll(void);

/* load.c: what a mode does when a request is over (whole or not). */
void request_over(struct conn *c);

#endif
