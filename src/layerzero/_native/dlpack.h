/* The part of the DLPack ABI, version 1, that is read here: how a tensor describes itself through the exchange API.
 *
 * Source: the DLPack 1.x specification. Written anew so that building needs no header of torch.
 */
#ifndef LAYERZERO_DLPACK_H
#define LAYERZERO_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1 }; /* kinds of devices */

enum { DL_INT = 0, DL_UINT = 1, DL_COMPLEX = 5 };

typedef struct {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t code; /* kind of number: integer, floating, bfloat, ... */
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major;
    uint32_t minor;
    void *previous;
    void *allocate;
    void *managed_from_object;
    void *object_from_managed;
    int (*describe)(void *object, DLTensor *out); /* borrows; sets a Python error and returns -1 where it cannot */
    void *current_stream;
} DLExchange;

#endif
