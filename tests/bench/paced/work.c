/* Work of a fixed amount on two threads, as a model's step is: the helper spins, then parks. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 20000 /* some 50 us */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_long begun, done, amount;
static atomic_int is_parked;

static void multiply(long times) {
    volatile uint64_t result;
    uint64_t x = 1;
    for (long i = 0; i < times; i++) x = x * 6364136223846793005u + 1442695040888963407u;
    result = x;
    (void)result;
}

static void *help(void *unused) {
    (void)unused;
    for (long mine = 1;; mine++) {
        for (int i = 0; i < SPINS && atomic_load(&begun) < mine; i++) __builtin_ia32_pause();
        pthread_mutex_lock(&lock);
        atomic_store(&is_parked, 1);
        while (atomic_load(&begun) < mine) pthread_cond_wait(&wake, &lock);
        atomic_store(&is_parked, 0);
        pthread_mutex_unlock(&lock);
        multiply(atomic_load(&amount));
        atomic_store(&done, mine);
    }
    return 0;
}

/* Both threads multiply ``times`` times; returns when both have. */
void work(long times) {
    static pthread_t helper;
    if (!helper) pthread_create(&helper, 0, help, 0);
    atomic_store(&amount, times);
    long mine = atomic_fetch_add(&begun, 1) + 1;
    if (atomic_load(&is_parked)) {
        pthread_mutex_lock(&lock);
        pthread_cond_signal(&wake);
        pthread_mutex_unlock(&lock);
    }
    multiply(times);
    while (atomic_load(&done) < mine) __builtin_ia32_pause();
}
