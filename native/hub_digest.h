/* Digests of idempotency keys: SipHash-1-3 with 128 bits, under a secret of this process.
 *
 * A key is channel, NUL, source, NUL, id. Publishers cannot construct two keys with one digest, and among
 * 2^32 keys the chance of a collision is below 2^-64, so the digest stands for the key. */
#ifndef VIRTA_HUB_DIGEST_H
#define VIRTA_HUB_DIGEST_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define DIGEST_BYTES 16

typedef struct { uint64_t a, b; } Digest;

static uint64_t digest_secret[2]; /* random, set when the module is loaded */

#define SIP_TURN(x, n) ((x) << (n) | (x) >> (64 - (n)))
#define SIP_ROUND do { \
        v0 += v1; v1 = SIP_TURN(v1, 13) ^ v0; v0 = SIP_TURN(v0, 32); \
        v2 += v3; v3 = SIP_TURN(v3, 16) ^ v2; \
        v0 += v3; v3 = SIP_TURN(v3, 21) ^ v0; \
        v2 += v1; v1 = SIP_TURN(v1, 17) ^ v2; v2 = SIP_TURN(v2, 32); \
    } while (0)

static inline Digest digest_of(const uint8_t *p, size_t size)
{
    uint64_t v0 = 0x736f6d6570736575u ^ digest_secret[0], v1 = 0x646f72616e646f6du ^ digest_secret[1] ^ 0xee;
    uint64_t v2 = 0x6c7967656e657261u ^ digest_secret[0], v3 = 0x7465646279746573u ^ digest_secret[1], word;
    const uint8_t *stop = p + (size & ~(size_t)7);
    for (; p < stop; p += 8) {
        memcpy(&word, p, 8);
        v3 ^= word; SIP_ROUND; v0 ^= word;
    }
    word = 0;
    memcpy(&word, p, size & 7);
    word |= (uint64_t)size << 56;
    v3 ^= word; SIP_ROUND; v0 ^= word;
    v2 ^= 0xee;
    SIP_ROUND; SIP_ROUND; SIP_ROUND;
    Digest d;
    d.a = v0 ^ v1 ^ v2 ^ v3;
    v1 ^= 0xdd;
    SIP_ROUND; SIP_ROUND; SIP_ROUND;
    d.b = v0 ^ v1 ^ v2 ^ v3;
    if (!d.a) d.a = 1; /* zero marks an empty slot */
    return d;
}

static inline int digest_same(Digest x, Digest y) { return x.a == y.a && x.b == y.b; }

#endif
