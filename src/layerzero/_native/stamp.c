/* Whether objects are still what they were: dicts, lists, classes and names by identity, at a few nanoseconds each. */
#include "hot.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* How many entries a dict has, then where each of the items stands that are looked at: two look-ups in one. */
static int same_dict(PyObject *dict, const int32_t *places, PyObject *items)
{
    Py_ssize_t count = PyTuple_GET_SIZE(items) / 2;
    PyObject *key, *value;
    if (PyDict_GET_SIZE(dict) != places[0])
        return 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        Py_ssize_t place = places[1 + at];
        if (!PyDict_Next(dict, &place, &key, &value) || key != PyTuple_GET_ITEM(items, 2 * at) ||
            value != PyTuple_GET_ITEM(items, 2 * at + 1))
            return 0;
    }
    return 1;
}

/* places(dict, items): for `unchanged`; items are keys and values of the dict, in its order. */
PyObject *stamp_places(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 2 || !PyDict_Check(args[0]) || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "places: wanted a dict and a tuple, got %zd arguments", given);
    Py_ssize_t count = PyTuple_GET_SIZE(args[1]) / 2, at = 0, place = 0, before = 0;
    PyObject *found = PyBytes_FromStringAndSize(NULL, (1 + count) * (Py_ssize_t)sizeof(int32_t)), *key;
    if (found == NULL)
        return NULL;
    int32_t *places = (int32_t *)PyBytes_AS_STRING(found);
    memset(places, 0, (1 + (size_t)count) * sizeof(int32_t)); /* an item that is not there is no match at any place */
    places[0] = (int32_t)PyDict_GET_SIZE(args[0]);
    while (at < count && PyDict_Next(args[0], &place, &key, NULL)) {
        if (key == PyTuple_GET_ITEM(args[1], 2 * at))
            places[1 + at++] = (int32_t)before;
        before = place;
    }
    return found;
}

static int same_keys(PyObject *dict, PyObject *keys)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keys), at = 0, place = 0;
    PyObject *key, *value;
    if (PyDict_GET_SIZE(dict) != count)
        return 0;
    for (; at < count && PyDict_Next(dict, &place, &key, &value); at++)
        if (key != PyTuple_GET_ITEM(keys, at))
            return 0;
    return at == count;
}

static int same_list(PyObject *list, PyObject *items)
{
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    if (PyList_GET_SIZE(list) != count)
        return 0;
    for (Py_ssize_t at = 0; at < count; at++)
        if (PyList_GET_ITEM(list, at) != PyTuple_GET_ITEM(items, at))
            return 0;
    return 1;
}

/* version(cls): a number that changes with anything of a class or its bases; 0 where there is none. */
PyObject *stamp_version(PyObject *module, PyObject *cls)
{
    (void)module;
    if (!PyType_Check(cls))
        return PyErr_Format(PyExc_TypeError, "wanted a class, got %s", Py_TYPE(cls)->tp_name);
    PyObject *found = PyObject_GetAttrString(cls, "__call__"); /* a look-up gives a class its number */
    if (found == NULL)
        PyErr_Clear();
    Py_XDECREF(found);
    return PyLong_FromUnsignedLong(((PyTypeObject *)cls)->tp_version_tag);
}

/* unchanged(objects, classes, dicts, keys, lists, names): pairs of an object and its class, and of a class and its
 * version; triples of a dict, places and items; pairs of a dict and its keys, and of a list and its items; triples of a
 * dict, a name and its value. The caller, which is identity.py, vouches for what lies in the tuples. */
PyObject *stamp_unchanged(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    for (Py_ssize_t i = 0; i < given; i++)
        if (!PyTuple_Check(args[i]))
            return PyErr_Format(PyExc_TypeError, "unchanged: wanted six tuples, got %s", Py_TYPE(args[i])->tp_name);
    if (given != 6)
        return PyErr_Format(PyExc_TypeError, "unchanged: wanted six tuples, got %zd", given);
    PyObject *objects = args[0], *classes = args[1], *dicts = args[2], *keys = args[3], *lists = args[4], *names = args[5];
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(objects); i += 2)
        if ((PyObject *)Py_TYPE(PyTuple_GET_ITEM(objects, i)) != PyTuple_GET_ITEM(objects, i + 1))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(classes); i += 2) {
        unsigned long wanted = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(classes, i + 1));
        if (wanted == (unsigned long)-1 && PyErr_Occurred())
            return NULL;
        if (wanted == 0 || ((PyTypeObject *)PyTuple_GET_ITEM(classes, i))->tp_version_tag != wanted)
            Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(dicts); i += 3)
        if (!same_dict(PyTuple_GET_ITEM(dicts, i), (const int32_t *)PyBytes_AS_STRING(PyTuple_GET_ITEM(dicts, i + 1)),
                       PyTuple_GET_ITEM(dicts, i + 2)))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(keys); i += 2)
        if (!same_keys(PyTuple_GET_ITEM(keys, i), PyTuple_GET_ITEM(keys, i + 1)))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(lists); i += 2)
        if (!same_list(PyTuple_GET_ITEM(lists, i), PyTuple_GET_ITEM(lists, i + 1)))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(names); i += 3) {
        PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(names, i), PyTuple_GET_ITEM(names, i + 1));
        if (value == NULL && PyErr_Occurred())
            return NULL;
        if (value != PyTuple_GET_ITEM(names, i + 2))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* stands(address, places, words): whether words of eight bytes are at their places, all by number in bytes objects. */
PyObject *stamp_stands(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 3 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[2]) ||
        PyBytes_GET_SIZE(args[1]) != PyBytes_GET_SIZE(args[2]))
        return PyErr_Format(PyExc_TypeError, "stands: wanted an address, places and words, got %zd arguments", given);
    const char *address = PyLong_AsVoidPtr(args[0]);
    if (address == NULL && PyErr_Occurred())
        return NULL;
    const int64_t *places = (const int64_t *)PyBytes_AS_STRING(args[1]);
    const uint64_t *words = (const uint64_t *)PyBytes_AS_STRING(args[2]);
    uint64_t word, others = 0;
    for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(args[1]) / 8; i++) {
        memcpy(&word, address + places[i] * 8, 8);
        others |= word ^ words[i];
    }
    return PyBool_FromLong(others == 0);
}

/* checksum(address, bytes): of memory that the caller knows to be there. Eight lanes of multiplications, which differ
 * wherever one word does and where words change places. */
PyObject *stamp_checksum(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "checksum: wanted an address and bytes, got %zd arguments", given);
    const char *address = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t bytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (address == NULL || bytes < 0)
        return PyErr_Format(PyExc_ValueError, "checksum: wanted memory, got %zd bytes", bytes);
    const uint64_t prime = 0x9E3779B97F4A7C15u;
    uint64_t lanes[8] = {1, 2, 3, 4, 5, 6, 7, 8}, word;
    Py_ssize_t at = 0;
    for (; at + 64 <= bytes; at += 64)
        for (int lane = 0; lane < 8; lane++) {
            memcpy(&word, address + at + lane * 8, 8);
            lanes[lane] = (lanes[lane] ^ word) * prime; /* odd: a word more or less is another product */
            lanes[lane] ^= lanes[lane] >> 29;
        }
    for (; at < bytes; at++)
        lanes[at & 7] = (lanes[at & 7] ^ (unsigned char)address[at]) * prime;
    uint64_t sum = 0;
    for (int lane = 0; lane < 8; lane++) {
        sum = (sum ^ lanes[lane]) * prime;
        sum ^= sum >> 32;
    }
    return PyLong_FromUnsignedLongLong(sum);
}

#ifdef __SSE2__
/* stream(to, address, bytes): copy memory that the caller knows to be there, by stores that go past the caches: a line
 * that another CPU's cache holds is not waited for. */
PyObject *stamp_stream(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 3)
        return PyErr_Format(PyExc_TypeError, "stream: wanted two addresses and bytes, got %zd arguments", given);
    char *to = PyLong_AsVoidPtr(args[0]);
    const char *from = PyLong_AsVoidPtr(args[1]);
    Py_ssize_t bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (to == NULL || from == NULL || bytes < 0)
        return PyErr_Format(PyExc_ValueError, "stream: wanted memory, got %zd bytes", bytes);
    Py_BEGIN_ALLOW_THREADS
    Py_ssize_t at = Py_MIN((Py_ssize_t)(-(uintptr_t)to & 15), bytes);
    memcpy(to, from, (size_t)at);
    for (; at + 64 <= bytes; at += 64)
        for (int part = 0; part < 64; part += 16)
            _mm_stream_si128((__m128i *)(to + at + part), _mm_loadu_si128((const __m128i *)(from + at + part)));
    memcpy(to + at, from + at, (size_t)(bytes - at));
    _mm_sfence();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
#endif
