#include "common.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

_Noreturn void die(const char *format, ...) {
    int error = errno;
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, error ? ": %s\n" : "\n", strerror(error));
    exit(1);
}

unsigned hex_digit(unsigned char ch) {
    unsigned value = ch;
    return value <= '9' ? value - '0' : (value | 0x20) - 'a' + 10;
}

void *must_alloc(size_t size) {
    void *memory = calloc(1, size);
    if (memory == NULL) die("no memory for %zu bytes", size);
    return memory;
}

void *must_grow(void *old, size_t size) {
    void *memory = realloc(old, size);
    if (memory == NULL) die("no memory for %zu bytes", size);
    return memory;
}

void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static struct sockaddr_in local_address(uint16_t port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

int listen_local(uint16_t *port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) die("socket");
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = local_address(*port);
    socklen_t size = sizeof address;
    if (bind(fd, (struct sockaddr *)&address, size) < 0) die("cannot bind 127.0.0.1:%u", *port);
    if (listen(fd, 4096) < 0) die("listen");
    if (getsockname(fd, (struct sockaddr *)&address, &size) < 0) die("getsockname");
    *port = ntohs(address.sin_port);
    return fd;
}

int connect_local(uint16_t port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    no_delay(fd);
    struct sockaddr_in address = local_address(port);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static unsigned bucket_of(uint64_t value) {
    if (value < (1u << HIST_SUB_BITS)) return (unsigned)value;
    unsigned shift = 63 - (unsigned)__builtin_clzll(value) - HIST_SUB_BITS;
    return ((shift + 1) << HIST_SUB_BITS) + (unsigned)(value >> shift) - (1u << HIST_SUB_BITS);
}

static uint64_t upper_end(unsigned bucket) {
    unsigned row = bucket >> HIST_SUB_BITS;
    uint64_t column = bucket & ((1u << HIST_SUB_BITS) - 1);
    if (row == 0) return column;
    return ((column + (1u << HIST_SUB_BITS) + 1) << (row - 1)) - 1;
}

void hist_add(struct hist *h, uint64_t value) {
    unsigned bucket = bucket_of(value);
    h->bucket[bucket < HIST_SIZE ? bucket : HIST_SIZE - 1]++;
    h->count++;
    h->sum += (double)value;
    if (value > h->max) h->max = value;
}

uint64_t hist_at(const struct hist *h, double q) {
    uint64_t wanted = (uint64_t)(q * (double)h->count + 0.999999);
    uint64_t seen = 0;
    for (unsigned i = 0; i < HIST_SIZE; i++) {
        seen += h->bucket[i];
        if (seen >= wanted && seen > 0) {
            uint64_t end = upper_end(i);
            return end < h->max ? end : h->max;
        }
    }
    return 0;
}

void hist_print(FILE *out, const struct hist *h) {
    fprintf(out,
            "{\"count\":%llu,\"mean\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f}",
            (unsigned long long)h->count, h->count ? h->sum / (double)h->count / 1e3 : 0.0, (double)hist_at(h, 0.5) / 1e3,
            (double)hist_at(h, 0.9) / 1e3, (double)hist_at(h, 0.99) / 1e3, (double)hist_at(h, 0.999) / 1e3,
            (double)h->max / 1e3);
}

static bool read_small(const char *path, char *buffer, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got = read(fd, buffer, size - 1);
    close(fd);
    if (got <= 0) return false;
    buffer[got] = '\0';
    return true;
}

static void add_process(struct cpu_time *sum, int pid) {
    char path[320];
    char text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (!read_small(path, text, sizeof text)) return;
    /* The name in parentheses may hold anything, so fields are counted from the last one. */
    char *rest = strrchr(text, ')');
    unsigned long long user = 0;
    unsigned long long kernel = 0;
    if (rest && sscanf(rest + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &kernel) == 2) {
        sum->user_ticks += user;
        sum->kernel_ticks += kernel;
    }
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    if (tasks == NULL) return;
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", pid, entry->d_name);
        unsigned long long on_cpu = 0;
        unsigned long long waited = 0;
        if (read_small(path, text, sizeof text) && sscanf(text, "%llu %llu", &on_cpu, &waited) == 2) {
            sum->total_ns += on_cpu;
            sum->waited_ns += waited;
        }
    }
    closedir(tasks);
}

struct cpu_time cpu_time_of(const int *pids, int count) {
    struct cpu_time sum = {0};
    for (int i = 0; i < count; i++) add_process(&sum, pids[i]);
    return sum;
}

int parse_pids(const char *text, int *pids, int limit) {
    int count = 0;
    char *end;
    while (*text && count < limit) {
        pids[count++] = (int)strtol(text, &end, 10);
        if (end == text) die("--watch wants process ids such as 12,34, not %s", text);
        text = *end == ',' ? end + 1 : end;
    }
    return count;
}
