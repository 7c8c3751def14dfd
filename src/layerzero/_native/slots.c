/* Where new tokens belong in a paged cache: one pass over tables and lengths in this process's memory.
 *
 * numpy takes 17 passes of a microsecond and more each; a step of a serving engine waits for all of them.
 */
#include "hot.h"

/* 1: integers of so many bits in rows without gaps, in this process's memory; 0: something else; -1: error */
static int dense(PyObject *object, DLTensor *out, int bits, int ndim)
{
    int plain = integers(object, out); /* memory that was given back has a shape all the same, and is none */
    if (plain <= 0 || out->bits != bits || out->ndim != ndim)
        return plain < 0 ? plain : 0;
    int64_t step = 1;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        if (out->shape[axis] > 1 && out->strides[axis] != step)
            return 0;
        step *= out->shape[axis];
    }
    return 1;
}

static void *memory_of(const DLTensor *tensor) { return (char *)tensor->data + tensor->byte_offset; }

/* slots(tables, lens, starts, tokens, page_size, pages, out): how many tokens are lost; -1 for starts that are none. */
PyObject *slots_fill(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *objects[4];
    long long tokens, page_size, pages;
    DLTensor tables, lens, starts, out;
    if (!PyArg_ParseTuple(args, "OOOLLLO:slots", &objects[0], &objects[1], &objects[2], &tokens, &page_size, &pages,
                          &objects[3]))
        return NULL;
    const int by_starts = objects[2] != Py_None;
    int plain = dense(objects[0], &tables, 32, 2);
    plain = plain <= 0 ? plain : dense(objects[1], &lens, 32, 1);
    plain = plain <= 0 || !by_starts ? plain : dense(objects[2], &starts, 32, 1);
    plain = plain <= 0 ? plain : dense(objects[3], &out, 64, 1);
    if (plain < 0)
        return NULL;
    const int64_t batch = plain ? lens.shape[0] : 0;
    if (!plain || tables.shape[0] != batch || (by_starts && starts.shape[0] != batch + 1) || page_size < 1 ||
        page_size > INT32_MAX || tokens < 0 || tokens > INT32_MAX) /* products of two such stay below 2^63 */
        Py_RETURN_NONE;
    const int32_t *table = memory_of(&tables), *ends = memory_of(&lens), *begins = by_starts ? memory_of(&starts) : NULL;
    int64_t *found = memory_of(&out), lost = 0, made = 0;
    if (by_starts && begins[0] != 0)
        return PyLong_FromLong(-1);
    for (int64_t row = 0; by_starts && row < batch; row++)
        if (begins[row + 1] < begins[row])
            return PyLong_FromLong(-1);
    if (out.shape[0] != (by_starts ? (int64_t)begins[batch] : batch * tokens))
        Py_RETURN_NONE;
    for (int64_t row = 0; row < batch; row++) {
        const int32_t *pages_of_row = table + row * tables.shape[1];
        const int64_t count = by_starts ? (int64_t)begins[row + 1] - begins[row] : tokens, end = ends[row];
        int64_t place = end - count;
        for (; place < end && place < 0; place++) /* before the sequence's first: nothing, and nothing is lost */
            found[made++] = -1;
        int64_t column = place / page_size, offset = place % page_size;
        while (place < end) {
            int64_t here = end - place < page_size - offset ? end - place : page_size - offset;
            int64_t page = column < tables.shape[1] ? pages_of_row[column] : -1;
            int there = page >= 0 && page < pages;
            for (int64_t i = 0; i < here; i++)
                found[made + i] = there ? page * page_size + offset + i : -1;
            lost += there ? 0 : here;
            made += here;
            place += here;
            column++;
            offset = 0;
        }
    }
    return PyLong_FromLongLong(lost);
}
