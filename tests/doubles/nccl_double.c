// A strict NCCL without GPUs: the point-to-point part of the ABI of libnccl.so.2, between processes of one host.
//
//   a stream      a thread that does its items one after the other; an item is the work of one group of calls
//   a launch      a thread too: work is on its stream, and pairs are connected, only after the call has returned
//   a way         a socket for each pair and direction: length and key of a message, "ready" from the receiver, the bytes
//
// Rules: a message of fewer than 64 KiB leaves before its receive is there; a longer one waits for it. A kernel whose
// peer is gone waits for its own abort, and the abort waits for all work of the process. A receive that was broken off
// has garbage. A join ends when all ranks are there. A call that the real library forbids, allows at one's peril or
// answers with a hang is an offence: it is written down, and fails where the real one would. NCCL has no tags, and takes
// the next message for any; so does the double, but it knows keys, and a receive that meets another's is an offence.
//
// NCCL_DOUBLE names the folder in which processes leave `offences`, `counts` and what the ranks of a group know of each
// other. Its file `modes` has two numbers: whether an error tells the end of a peer, and the length of 64 KiB.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { VERSION = 22809, MAGIC = 0xcafebeef, UINT8 = 1, MOST_RANKS = 64, GARBAGE = 0xA5 };
enum { JOINS, EAGER, RENDEZVOUS, REVOKES, ABORTS, REMOTE_ERRORS, BROKEN_OFF, NUM_COUNTS = 16 };
enum { DONE, BROKEN, ENDED }; // a move of bytes: done, the peer is gone, the communicator was revoked or aborted

typedef struct { char internal[128]; } UniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config; // the fields that are read

typedef struct Op { struct Op *next; int is_send, peer; char *at; size_t length; uint64_t key; } Op;
typedef struct Comm Comm;
typedef struct Item { struct Item *next; Comm *comm; Op *ops; atomic_int *until; } Item; // `until`: of one that stands
typedef struct Stream {
    struct Stream *next;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    long given, done;
    Item *first, **end;
    atomic_int go_on;
} Stream;
// What the processes of a group see of each other: the kernels of a rank that use memory of another one, and whether
// that memory was freed under one of them.
typedef struct { atomic_int uses[MOST_RANKS][MOST_RANKS], freed_under[MOST_RANKS]; } Shared;
struct Comm {
    Comm *next;
    UniqueId id;
    int rank, size, listener, ends_fd, *out, *in;
    char *is_out_connected, *is_in_connected;
    atomic_int state, failed, pending, ends, is_joined, is_revoked, is_freed, has_worked;
    pthread_t joining;
    Shared *shared;
};

static Comm *comms;
static Stream *streams;
static _Atomic uint64_t *counts;
static atomic_int inside, thread_of_calls;
static char folder[200], last_error[300];
static int tells_deaths = 1;
static size_t least_rendezvous = 64 << 10;
static __thread int depth, group_error;
static __thread uint64_t key_of_all;
static __thread Op *group_ops, *group_last;
static __thread Comm *group_comm;
static __thread Stream *group_stream;

static void fail(int line) {
    fprintf(stderr, "the double of NCCL fails in line %d: %s\n", line, strerror(errno));
    abort();
}

static void count(int which) { counts[which]++; }

static int offence(int result, const char *form, ...) {
    va_list given;
    va_start(given, form);
    vsnprintf(last_error, sizeof last_error, form, given);
    va_end(given);
    char line[600], path[300];
    int length = snprintf(line, sizeof line, "process %d: %s\n", getpid(), last_error);
    snprintf(path, sizeof path, "%s/offences", folder);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, line, length) != length) fputs(line, stderr);
    if (file >= 0) close(file);
    return result;
}

static void *shared_file(const char *name, size_t length) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, length)) fail(__LINE__);
    void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) fail(__LINE__);
    return at;
}

__attribute__((constructor)) static void begin_process(void) {
    const char *given = getenv("NCCL_DOUBLE");
    char path[300];
    snprintf(folder, sizeof folder, "%s", given ? given : ".");
    counts = shared_file("counts", NUM_COUNTS * sizeof *counts);
    snprintf(path, sizeof path, "%s/modes", folder);
    FILE *modes = fopen(path, "re");
    if (modes && fscanf(modes, "%d %zu", &tells_deaths, &least_rendezvous) != 2) fail(__LINE__);
    if (modes) fclose(modes);
    srand(getpid());
}

static void in_background(void *(*run)(void *), void *given) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, given)) fail(__LINE__);
    pthread_detach(thread);
}

static void nap(long us) { nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL); }

// One thread of a process calls, and one call at a time.
static int enter(const char *name) {
    int none = 0, me = gettid();
    atomic_compare_exchange_strong(&thread_of_calls, &none, me);
    if (thread_of_calls != me) offence(0, "%s from a second thread", name);
    if (atomic_exchange(&inside, 1)) offence(0, "%s while another call is in NCCL", name);
    return 0;
}
#define CALL(body) enter(__func__); int result = (body); inside = 0; return result

static Comm *known(Comm *c) {
    for (Comm *each = comms; each; each = each->next)
        if (each == c) return c->is_freed ? NULL : c;
    return NULL;
}

// Moves bytes over a way; ends with the communicator.
static int moved(Comm *c, int fd, void *at, size_t length, int writes) {
    for (char *p = at; length;) {
        struct pollfd polls[] = {{fd, writes ? POLLOUT : POLLIN, 0}, {c->ends_fd, POLLIN, 0}};
        if (poll(polls, 2, -1) < 0 && errno == EINTR) continue;
        if (c->ends) return ENDED;
        ssize_t n = writes ? send(fd, p, length, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, p, length, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return BROKEN;
        p += n;
        length -= n;
    }
    return DONE;
}

static void until_it_ends(Comm *c) {
    while (!c->ends) poll(&(struct pollfd){c->ends_fd, POLLIN, 0}, 1, -1);
}

// Joining: each rank listens, and connects one socket to each other one.

static socklen_t address_of(struct sockaddr_un *a, const UniqueId *id, int rank) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int length = snprintf(a->sun_path + 1, 100, "nccl-%s-%d", id->internal, rank);
    return offsetof(struct sockaddr_un, sun_path) + 1 + length;
}

static void *join_all(void *given) {
    Comm *c = given;
    int missing = 2 * (c->size - 1);
    while (missing && !c->ends) {
        for (int rank = 0; rank < c->size; rank++) {
            if (rank == c->rank || c->out[rank] >= 0) continue;
            struct sockaddr_un a;
            socklen_t length = address_of(&a, &c->id, rank);
            int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            if (connect(fd, (void *)&a, length) || moved(c, fd, &c->rank, sizeof c->rank, 1) != DONE) close(fd);
            else missing--, c->out[rank] = fd;
        }
        struct pollfd polls[] = {{c->listener, POLLIN, 0}, {c->ends_fd, POLLIN, 0}};
        int rank, fd = poll(polls, 2, 2) > 0 ? accept4(c->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
        if (fd < 0) continue;
        if (moved(c, fd, &rank, sizeof rank, 0) != DONE) close(fd);
        else missing--, c->in[rank] = fd;
    }
    c->is_joined = !c->ends;
    if (c->is_joined) c->state = SUCCESS;
    return NULL;
}

static int begin_join(Comm **made, int size, UniqueId id, int rank, Config *config) {
    if (config->size < sizeof(Config) || config->magic != MAGIC || config->version < 21400)
        return offence(INVALID_ARGUMENT, "a configuration that is none");
    if (config->blocking) return offence(INVALID_ARGUMENT, "a communicator whose calls block");
    if (rank < 0 || rank >= size || size > MOST_RANKS) return offence(INVALID_ARGUMENT, "rank %d of %d", rank, size);
    if (depth) return offence(INVALID_USAGE, "a group is joined inside of a group of calls");
    int beside = 0;
    for (Comm *each = comms; each; each = each->next) beside += !each->is_freed && !each->ends;
    if (beside > 1) offence(0, "a group is joined beside %d others", beside);
    Comm *c = calloc(1, sizeof *c);
    *c = (Comm){.next = comms, .id = id, .rank = rank, .size = size, .state = IN_PROGRESS};
    c->ends_fd = eventfd(0, EFD_CLOEXEC);
    c->out = malloc(size * sizeof(int)), c->in = malloc(size * sizeof(int));
    memset(c->out, -1, size * sizeof(int)), memset(c->in, -1, size * sizeof(int));
    c->is_out_connected = calloc(1, size), c->is_in_connected = calloc(1, size);
    struct sockaddr_un a;
    socklen_t length = address_of(&a, &id, rank);
    c->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (bind(c->listener, (void *)&a, length) || listen(c->listener, MOST_RANKS)) return SYSTEM_ERROR;
    c->shared = shared_file(id.internal, sizeof *c->shared);
    pthread_create(&c->joining, NULL, join_all, c);
    comms = *made = c;
    count(JOINS);
    return IN_PROGRESS;
}

// Kernels: what an item does on its stream, a thread for each way if there are several.

typedef struct { Item *item; int is_send, peer, found; pthread_t thread; } Way;

static int send_one(Comm *c, int fd, Op *op) {
    uint64_t head[] = {op->length, op->key};
    char ready;
    int found = moved(c, fd, head, sizeof head, 1);
    if (!found && op->length >= least_rendezvous) found = moved(c, fd, &ready, 1, 0);
    count(op->length >= least_rendezvous ? RENDEZVOUS : EAGER);
    return found ? found : moved(c, fd, op->at, op->length, 1);
}

static int receive_one(Comm *c, int fd, Op *op) {
    uint64_t head[2];
    char ready = 'r';
    int found = moved(c, fd, head, sizeof head, 0);
    if (!found && head[1] != op->key)
        offence(0, "a receive of message %zu met a send of message %zu", (size_t)op->key, (size_t)head[1]);
    if (!found && head[0] != op->length) {
        offence(0, "a receive of %zu bytes met a send of %zu", op->length, (size_t)head[0]);
        until_it_ends(c);
        return ENDED;
    }
    if (!found && op->length >= least_rendezvous) found = moved(c, fd, &ready, 1, 1);
    return found ? found : moved(c, fd, op->at, op->length, 0);
}

static void *run_way(void *given) {
    Way *way = given;
    Comm *c = way->item->comm;
    int fd = way->is_send ? c->out[way->peer] : c->in[way->peer];
    c->shared->uses[c->rank][way->peer]++;
    for (Op *op = way->item->ops; op; op = op->next) {
        if (op->peer != way->peer || op->is_send != way->is_send) continue;
        if (!way->found) way->found = way->is_send ? send_one(c, fd, op) : receive_one(c, fd, op);
        if (way->found == BROKEN) {
            if (tells_deaths && !atomic_exchange(&c->failed, REMOTE_ERROR)) count(REMOTE_ERRORS);
            until_it_ends(c);
            way->found = ENDED;
        }
        if (way->found && !op->is_send) memset(op->at, GARBAGE, op->length);
    }
    c->shared->uses[c->rank][way->peer]--;
    return NULL;
}

static int connect_way(Comm *c, Way *way) { // a pair is connected when both have called, before any of their work
    char *is_connected = way->is_send ? c->is_out_connected : c->is_in_connected, byte = 'c';
    if (is_connected[way->peer]) return DONE;
    int fd = way->is_send ? c->out[way->peer] : c->in[way->peer];
    int found = moved(c, fd, &byte, 1, way->is_send);
    if (!found) found = moved(c, fd, &byte, 1, !way->is_send);
    is_connected[way->peer] = !found;
    return found;
}

static void *connect_in_thread(void *given) {
    Way *way = given;
    way->found = connect_way(way->item->comm, way);
    return NULL;
}

static int at_once(Item *item, void *(*run)(void *)) {
    Way ways[2 * MOST_RANKS];
    int n = 0, found = DONE;
    for (Op *op = item->ops; op; op = op->next) {
        int i = 0;
        while (i < n && (ways[i].peer != op->peer || ways[i].is_send != op->is_send)) i++;
        if (i == n) ways[n++] = (Way){item, op->is_send, op->peer, DONE, 0};
    }
    for (int i = 1; i < n; i++) pthread_create(&ways[i].thread, NULL, run, &ways[i]);
    if (n) run(&ways[0]);
    for (int i = 1; i < n; i++) pthread_join(ways[i].thread, NULL);
    for (int i = 0; i < n; i++) if (ways[i].found) found = ways[i].found;
    return found;
}

static void ends_item(Item *item) {
    Comm *c = item->comm;
    for (Op *op = item->ops, *next; op; op = next) next = op->next, free(op);
    free(item);
    if (c) c->pending--;
}

static void *run_stream(void *given) {
    for (Stream *s = given;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->first) pthread_cond_wait(&s->moved, &s->lock);
        Item *item = s->first;
        pthread_mutex_unlock(&s->lock);
        while (item->until && !*item->until) nap(500);
        if (at_once(item, run_way) == ENDED) count(BROKEN_OFF);
        pthread_mutex_lock(&s->lock);
        if (!(s->first = item->next)) s->end = &s->first;
        s->done++;
        pthread_cond_broadcast(&s->moved);
        pthread_mutex_unlock(&s->lock);
        ends_item(item);
    }
    return NULL;
}

static void put(Stream *s, Item *item) {
    pthread_mutex_lock(&s->lock);
    *s->end = item;
    s->end = &item->next;
    s->given++;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
}

typedef struct { Item *item; Stream *stream; long after_us; } Launch;

static void *launch(void *given) {
    Launch of = *(Launch *)given;
    free(given);
    Comm *c = of.item->comm;
    nap(of.after_us);
    int found = at_once(of.item, connect_in_thread), busy = IN_PROGRESS;
    if (found == BROKEN && !tells_deaths) until_it_ends(c);
    if (found) {
        for (Op *op = of.item->ops; op; op = op->next) if (!op->is_send) memset(op->at, GARBAGE, op->length);
        ends_item(of.item);
    } else put(of.stream, of.item);
    int result = found == BROKEN && tells_deaths ? REMOTE_ERROR : SUCCESS;
    if (!c->ends) atomic_compare_exchange_strong(&c->state, &busy, result);
    return NULL;
}

// Groups of calls

static int add(int is_send, char *at, size_t length, int type, int peer, Comm *c, Stream *s) {
    const char *name = is_send ? "a send" : "a receive";
    if (!known(c)) return offence(INVALID_ARGUMENT, "%s for a communicator that is none, or was aborted", name);
    if (c->is_revoked) return offence(INVALID_USAGE, "%s for a communicator that was revoked", name);
    if (c->state == IN_PROGRESS) return offence(INVALID_ARGUMENT, "%s before the last call has settled", name);
    if (!depth) return offence(INVALID_USAGE, "%s outside of a group of calls", name);
    if (group_comm && group_comm != c) return offence(INVALID_USAGE, "two communicators in one group of calls");
    if (group_comm && group_stream != s) return offence(INVALID_USAGE, "two streams in one group of calls");
    if (c->state || c->failed) return c->state ? c->state : c->failed;
    if (type != UINT8 || peer < 0 || peer >= c->size || peer == c->rank || !at || !length)
        return offence(INVALID_ARGUMENT, "%s of %zu bytes of type %d, peer %d", name, length, type, peer);
    Op *op = malloc(sizeof *op);
    *op = (Op){NULL, is_send, peer, at, length, key_of_all};
    if (group_last) group_last->next = op;
    else group_ops = op;
    group_last = op;
    group_comm = c;
    group_stream = s;
    return SUCCESS;
}

static int in_group(int found) {
    if (found && !group_error) group_error = found;
    return found;
}

static void look_for_others_at_work(Comm *c) {
    for (Comm *each = comms; each; each = each->next) {
        if (each != c && !each->is_freed && !each->ends && each->has_worked)
            offence(0, "work for a communicator while another one is at work");
        for (int rank = 0; rank < each->size && each != c; rank++) // an illegal address, which the next launch meets
            if (atomic_exchange(&each->shared->freed_under[each->rank], 0))
                offence(0, "an abort of another rank freed memory under a kernel of rank %d", each->rank);
    }
}

static int end_group(void) {
    if (depth < 1) return offence(INVALID_USAGE, "the end of a group of calls that was not begun");
    if (--depth) return SUCCESS;
    Comm *c = group_comm;
    Op *ops = group_ops;
    int error = group_error;
    group_comm = NULL, group_ops = group_last = NULL, group_error = SUCCESS;
    if (error || !ops) {
        for (Op *op = ops, *next; op; op = next) next = op->next, free(op);
        return error;
    }
    look_for_others_at_work(c);
    Launch *of = malloc(sizeof *of);
    Item *item = calloc(1, sizeof *item);
    item->comm = c, item->ops = ops;
    *of = (Launch){item, group_stream, rand() % 16 ? rand() % 300 : 2000};
    c->state = IN_PROGRESS;
    c->has_worked = 1;
    c->pending++;
    in_background(launch, of);
    return IN_PROGRESS;
}

// Leaving: both end what is under way; only an abort frees.

static void ends(Comm *c) {
    uint64_t one = 1;
    c->ends = 1;
    if (write(c->ends_fd, &one, sizeof one) < 0) fail(__LINE__);
}

static void *quiet(void *given) {
    Comm *c = given;
    while (c->pending) nap(200);
    c->state = SUCCESS; // an error of the sockets stays
    return NULL;
}

static int revoke_comm(Comm *c, int flags) {
    if (!known(c)) return offence(INVALID_ARGUMENT, "a revoke of a communicator that is none, or was aborted");
    if (flags) return offence(INVALID_ARGUMENT, "a revoke with flags");
    if (c->is_revoked) return offence(INVALID_ARGUMENT, "a second revoke");
    if (!c->is_joined) return offence(INVALID_ARGUMENT, "a revoke of a communicator whose ranks are joining");
    if (depth) return offence(INVALID_USAGE, "a revoke inside of a group of calls");
    count(REVOKES);
    c->is_revoked = 1;
    c->state = IN_PROGRESS;
    ends(c);
    in_background(quiet, c);
    return IN_PROGRESS;
}

static int abort_comm(Comm *c) {
    if (!known(c)) return offence(INVALID_ARGUMENT, "an abort of a communicator that is none, or was aborted");
    if (depth) return offence(INVALID_USAGE, "an abort inside of a group of calls");
    count(ABORTS);
    ends(c);
    pthread_join(c->joining, NULL);
    while (c->pending || (c->is_revoked && c->state == IN_PROGRESS)) nap(100);
    for (Stream *s = streams; s; s = s->next) { // freeing memory waits for the device
        pthread_mutex_lock(&s->lock);
        while (s->done < s->given) pthread_cond_wait(&s->moved, &s->lock);
        pthread_mutex_unlock(&s->lock);
    }
    for (int rank = 0; rank < c->size; rank++)
        if (c->shared->uses[rank][c->rank]) c->shared->freed_under[rank] = 1;
    for (int rank = 0; rank < c->size; rank++) {
        if (c->out[rank] >= 0) close(c->out[rank]);
        if (c->in[rank] >= 0) close(c->in[rank]);
    }
    close(c->listener);
    close(c->ends_fd);
    c->is_freed = 1;
    return SUCCESS;
}

static int async_error(Comm *c, int *found) {
    if (!known(c)) return offence(INVALID_ARGUMENT, "a question about a communicator that is none, or was aborted");
    *found = c->state ? c->state : c->failed;
    return SUCCESS;
}

static int new_id(UniqueId *id) {
    uint64_t number[2];
    memset(id, 0, sizeof *id);
    if (getrandom(number, sizeof number, 0) != sizeof number) return SYSTEM_ERROR;
    snprintf(id->internal, 60, "%lx-%lx", number[0], number[1]);
    return SUCCESS;
}

// The ABI

int ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }
const char *ncclGetErrorString(int result) {
    static const char *words[] = {"no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)", "internal error", "invalid argument",
        "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return result >= 0 && result <= IN_PROGRESS ? words[result] : "unknown result code";
}
const char *ncclGetLastError(Comm *c) { return last_error; }
int ncclGetUniqueId(UniqueId *id) { CALL(new_id(id)); }
int ncclCommInitRankConfig(Comm **made, int size, UniqueId id, int rank, Config *config) {
    CALL(begin_join(made, size, id, rank, config));
}
int ncclSend(char *at, size_t length, int type, int peer, Comm *c, Stream *s) {
    CALL(in_group(add(1, at, length, type, peer, c, s)));
}
int ncclRecv(char *at, size_t length, int type, int peer, Comm *c, Stream *s) {
    CALL(in_group(add(0, at, length, type, peer, c, s)));
}
int ncclGroupStart(void) { CALL(depth++ * 0); }
int ncclGroupEnd(void) { CALL(end_group()); }
int ncclCommGetAsyncError(Comm *c, int *found) { CALL(async_error(c, found)); }
int ncclCommRevoke(Comm *c, int flags) { CALL(revoke_comm(c, flags)); }
int ncclCommAbort(Comm *c) { CALL(abort_comm(c)); }

// What CUDA has for streams: its moments, and a kernel that stands until it may go on.

Stream *doubleStream(void) {
    Stream *s = calloc(1, sizeof *s);
    s->next = streams, s->end = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->moved, NULL);
    in_background(run_stream, s);
    return streams = s;
}
long doubleMoment(Stream *s) {
    pthread_mutex_lock(&s->lock);
    long number = s->given;
    pthread_mutex_unlock(&s->lock);
    return number;
}
int doubleHasCome(Stream *s, long number) {
    pthread_mutex_lock(&s->lock);
    int has_come = s->done >= number;
    pthread_mutex_unlock(&s->lock);
    return has_come;
}
void doubleWait(Stream *s, long number) {
    pthread_mutex_lock(&s->lock);
    while (s->done < number) pthread_cond_wait(&s->moved, &s->lock);
    pthread_mutex_unlock(&s->lock);
}
void doubleStand(Stream *s) {
    Item *item = calloc(1, sizeof *item);
    item->until = &s->go_on;
    s->go_on = 0;
    put(s, item);
}
void doubleGoOn(Stream *s) { s->go_on = 1; }

// What NCCL has not: the key of the messages that are given from now on, or 0.

void doubleKey(uint64_t key) { key_of_all = key; }
