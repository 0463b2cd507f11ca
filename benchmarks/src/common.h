/* What the mock engine and the load generator share: a clock, sockets, a histogram, CPU time of other processes. */
#ifndef BENCH_COMMON_H
#define BENCH_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define NS_PER_S 1000000000ULL
#define NS_PER_US 1000ULL

/* Nanoseconds of CLOCK_MONOTONIC: the same clock in every process, so a timestamp made by the mock can be compared. */
uint64_t now_ns(void);

/* Prints a message (and errno's text if it is set) and ends the process with status 1. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The value of a hexadecimal digit; over 15 for anything else. */
unsigned hex_digit(unsigned char ch);

void *must_alloc(size_t size);
void *must_grow(void *old, size_t size);

/* A non-blocking listener on 127.0.0.1; port 0 takes a free one. The port it got is stored in *port. */
int listen_local(uint16_t *port);
/* Begins a non-blocking connection to 127.0.0.1:port with TCP_NODELAY; -1 with errno on failure. */
int connect_local(uint16_t port);
void no_delay(int fd);

/* Latencies in nanoseconds, in buckets 1/64 of their size apart (at most 1.6 % error), from 1 ns to 18 minutes. */
#define HIST_SUB_BITS 6
#define HIST_SIZE ((64 - HIST_SUB_BITS) << HIST_SUB_BITS)
struct hist {
    uint64_t bucket[HIST_SIZE];
    uint64_t count;
    uint64_t max;
    double sum;
};
void hist_add(struct hist *h, uint64_t value);
/* The value that a share q (0..1) of all values does not exceed; 0 if there are none. */
uint64_t hist_at(const struct hist *h, double q);
/* {"count":..,"mean":..,"p50":..,...} in microseconds. */
void hist_print(FILE *out, const struct hist *h);

#define MAX_WATCHED 64
/* CPU time of a process with all its threads: exact total (schedstat), and the user/kernel split in clock ticks. */
struct cpu_time {
    uint64_t total_ns;
    uint64_t waited_ns; /* ready to run while others had the core */
    uint64_t user_ticks;
    uint64_t kernel_ticks;
};
/* Adds up the CPU time of the processes in pids. A process that is gone counts as nothing. */
struct cpu_time cpu_time_of(const int *pids, int count);
/* Parses "12,34,56"; returns how many. */
int parse_pids(const char *text, int *pids, int limit);

#endif
