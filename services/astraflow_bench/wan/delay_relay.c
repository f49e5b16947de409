/* delay_relay LEFT_PID RIGHT_PID DEVICE DELAY_US RING_BYTES: a long link between two network namespaces.

   Makes one tun device in the network namespace of each process and carries every IP packet from one to the other
   DELAY_US later, in order, without looking into it; so TCP between the two sides meets a real round trip of twice
   the delay, with its windows and its slow start. Packets keep their segmentation offload, so 64 KiB cost one read
   and one write. What exceeds RING_BYTES on the way waits in the device's queue and is dropped there, as by a router.
   Rates are not its business: queueing disciplines on the devices set them.

   Prints "ready" when both devices exist. Every line on stdin is answered with a line of counters; the end of stdin
   ends it. `astraflow bench wan` compiles and starts it. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MOST_PACKET (65536 + 64)
#define SECOND_NS 1000000000ull

typedef struct {
  uint64_t due_ns;
  uint32_t size; /* 0: the rest of the ring is unused, go on at its start */
  uint32_t unused;
} Record;

typedef struct {
  int from, to;
  uint64_t delay_ns;
  uint8_t *ring;
  size_t ring_bytes, head, tail, used;
  _Atomic uint64_t bytes, packets, refused, latest_ns;
} Direction;

static void fail(const char *what) {
  fprintf(stderr, "delay_relay: %s: %s\n", what, strerror(errno));
  exit(1);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

static int open_device(const char *pid, const char *name) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
  int space = open(path, O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET)) fail(path);
  close(space);
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  struct ifreq request = {0};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
  if (ioctl(device, TUNSETIFF, &request)) fail("TUNSETIFF");
  if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
  return device;
}

static size_t padded(size_t size) { return (sizeof(Record) + size + 15) & ~(size_t)15; }

/* Whether a packet of any size fits behind the newest one; may move `tail` to the start of the ring. */
static int has_room(Direction *way) {
  size_t need = padded(MOST_PACKET);
  if (way->used && way->tail <= way->head) return way->head - way->tail >= need;
  if (way->ring_bytes - way->tail >= need + sizeof(Record)) return 1;
  if (way->head < need) return 0;
  ((Record *)(way->ring + way->tail))->size = 0;
  way->used += way->ring_bytes - way->tail;
  way->tail = 0;
  return way->head >= need;
}

/* Take packets while there are any and room for them; whether it stopped for want of packets. */
static int take(Direction *way) {
  for (int count = 0; count < 16; count++) {
    if (!has_room(way)) return 0;
    Record *record = (Record *)(way->ring + way->tail);
    ssize_t size = read(way->from, record + 1, MOST_PACKET);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    if (size <= 0) fail("read");
    record->due_ns = now_ns() + way->delay_ns;
    record->size = (uint32_t)size;
    way->tail += padded((size_t)size);
    way->used += padded((size_t)size);
  }
  return 0;
}

/* Hand over what is due; when the next packet is, or 0 when there is none. */
static uint64_t hand_over(Direction *way) {
  while (way->used) {
    Record *record = (Record *)(way->ring + way->head);
    if (!record->size) {
      way->used -= way->ring_bytes - way->head;
      way->head = 0;
      continue;
    }
    uint64_t now = now_ns();
    if (record->due_ns > now) return record->due_ns;
    uint64_t late = now - record->due_ns;
    if (late > atomic_load(&way->latest_ns)) atomic_store(&way->latest_ns, late);
    /* A device that is down or full refuses: a lost packet, which TCP repairs. */
    if (write(way->to, record + 1, record->size) != (ssize_t)record->size)
      atomic_fetch_add(&way->refused, 1);
    atomic_fetch_add(&way->bytes, record->size);
    atomic_fetch_add(&way->packets, 1);
    way->used -= padded(record->size);
    way->head += padded(record->size);
  }
  way->head = way->tail = 0;
  return 0;
}

static void *carry(void *argument) {
  Direction *way = argument;
  struct pollfd source = {.fd = way->from, .events = POLLIN};
  for (;;) {
    int drained = take(way);
    uint64_t due = hand_over(way);
    if (!drained && has_room(way)) continue;
    uint64_t now = now_ns(), wait = due > now ? due - now : due ? 0 : SECOND_NS;
    struct timespec timeout = {(time_t)(wait / SECOND_NS), (long)(wait % SECOND_NS)};
    /* A full ring takes nothing: only time makes room. */
    if (ppoll(&source, has_room(way) ? 1 : 0, &timeout, NULL) < 0 && errno != EINTR) fail("ppoll");
  }
  return NULL;
}

static void start(Direction *way, int from, int to, uint64_t delay_ns, size_t ring_bytes) {
  way->from = from;
  way->to = to;
  way->delay_ns = delay_ns;
  way->ring_bytes = ring_bytes;
  way->ring = aligned_alloc(64, ring_bytes);
  if (!way->ring) fail("memory for the ring");
  pthread_t thread;
  if (pthread_create(&thread, NULL, carry, way)) fail("thread");
}

static void report(const char *name, Direction *way, const char *end) {
  printf("\"%s\": {\"bytes\": %llu, \"packets\": %llu, \"refused\": %llu, \"latest_us\": %llu}%s", name,
         (unsigned long long)atomic_load(&way->bytes), (unsigned long long)atomic_load(&way->packets),
         (unsigned long long)atomic_load(&way->refused),
         (unsigned long long)atomic_exchange(&way->latest_ns, 0) / 1000, end);
}

int main(int argc, char **argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: delay_relay LEFT_PID RIGHT_PID DEVICE DELAY_US RING_BYTES\n");
    return 64;
  }
  uint64_t delay_ns = strtoull(argv[4], NULL, 10) * 1000;
  size_t ring_bytes = (strtoull(argv[5], NULL, 10) + 63) & ~(size_t)63;
  if (ring_bytes < 4 * padded(MOST_PACKET)) {
    fprintf(stderr, "delay_relay: a ring of %zu bytes is too small, use at least 1 MiB\n", ring_bytes);
    return 64;
  }
  int left = open_device(argv[1], argv[3]), right = open_device(argv[2], argv[3]);
  /* A link is never busy with other work: not to be later than it says, go before other processes where allowed. */
  struct sched_param first = {.sched_priority = 1};
  sched_setscheduler(0, SCHED_FIFO, &first);
  static Direction there, back;
  start(&there, left, right, delay_ns, ring_bytes);
  start(&back, right, left, delay_ns, ring_bytes);
  printf("ready\n");
  fflush(stdout);
  char line[64];
  while (fgets(line, sizeof line, stdin)) {
    printf("{");
    report("there", &there, ", ");
    report("back", &back, "}\n");
    fflush(stdout);
  }
  return 0;
}
