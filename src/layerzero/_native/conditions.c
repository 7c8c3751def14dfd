/* What a plan demands of the exact arguments beyond its coarse key: limits as data, evaluated on the exact key.
 *
 * layerzero.core.reuse_conditions writes the same conditions as tuples (code, operands, numbers), and evaluates them in
 * Python; an operand is `tensor << 8 | axis << 1 | 1 for its stride`. Here they are resolved once to word numbers: a coarse key
 * has the ranks of all tensors, so an operand is the same word in every exact key that reaches the program.
 */
#include "hot.h"

enum { SAME, WITHIN, MULTIPLE, ANY_OF, CLASS, DENSE, LOOSE, CODES };

#define END -1

static int64_t resolve(long operand, const Key *key)
{
    long tensor = operand >> 8, axis = operand >> 1 & 0x7F;
    if (tensor < 0 || tensor >= MAX_TENSORS || key->ndim[tensor] < 0 || axis >= key->ndim[tensor])
        return -1;
    return key->start[tensor] + 1 + axis + (operand & 1 ? key->ndim[tensor] : 0);
}

static int parse_one(PyObject *condition, const Key *key, int64_t *out)
{
    long code;
    PyObject *operands, *numbers;
    if (!PyArg_ParseTuple(condition, "lO!O!", &code, &PyTuple_Type, &operands, &PyTuple_Type, &numbers))
        return -1;
    Py_ssize_t operand_count = PyTuple_GET_SIZE(operands), number_count = PyTuple_GET_SIZE(numbers);
    static const int wanted_numbers[CODES] = {0, 2, 1, -1, 1, 0, 0}; /* -1: any number of them */
    int fits = code >= 0 && code < CODES && operand_count > 0 &&
               (wanted_numbers[code] < 0 || wanted_numbers[code] == number_count) &&
               ((code != DENSE && code != LOOSE) || operand_count % 2 == 0);
    *out++ = code;
    *out++ = operand_count;
    *out++ = number_count;
    for (Py_ssize_t i = 0; fits && i < operand_count; i++) {
        int64_t word = resolve(PyLong_AsLong(PyTuple_GET_ITEM(operands, i)), key);
        fits = word >= 0;
        *out++ = word;
    }
    for (Py_ssize_t i = 0; fits && i < number_count; i++)
        *out++ = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i));
    if (!fits && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "wanted a condition on axes that the call has, got %R", condition);
    return PyErr_Occurred() ? -1 : 0;
}

int64_t *conditions_parse(PyObject *conditions, const Key *key)
{
    if (!PyTuple_Check(conditions)) {
        PyErr_SetString(PyExc_TypeError, "wanted a tuple of conditions");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(conditions), words = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *condition = PyTuple_GET_ITEM(conditions, i);
        if (!PyTuple_Check(condition) || PyTuple_GET_SIZE(condition) != 3 ||
            !PyTuple_Check(PyTuple_GET_ITEM(condition, 1)) || !PyTuple_Check(PyTuple_GET_ITEM(condition, 2))) {
            PyErr_Format(PyExc_TypeError, "wanted (code, operands, numbers), got %R", condition);
            return NULL;
        }
        words += 3 + PyTuple_GET_SIZE(PyTuple_GET_ITEM(condition, 1));
        words += PyTuple_GET_SIZE(PyTuple_GET_ITEM(condition, 2));
    }
    int64_t *program = PyMem_New(int64_t, words), *out = program;
    if (program == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parse_one(PyTuple_GET_ITEM(conditions, i), key, out) < 0) {
            PyMem_Free(program);
            return NULL;
        }
        out += 3 + out[1] + out[2];
    }
    *out = END;
    return program;
}

static int dense(const int64_t *operands, int64_t axes, const int64_t *exact)
{
    int64_t expected = 1;
    for (int64_t axis = axes - 1; axis >= 0; axis--) {
        int64_t size = exact[operands[axis]], stride = exact[operands[axes + axis]];
        if (size == 1)
            continue;
        if (stride != expected && size != 0)
            return 0;
        expected *= size;
    }
    return 1;
}

static int product_class(const int64_t *operands, int64_t count, const int64_t *exact)
{
    uint64_t product = 1;
    for (int64_t i = 0; i < count; i++)
        if (__builtin_mul_overflow(product, (uint64_t)exact[operands[i]], &product))
            return -1;
    return product == 0 ? 0 : 64 - __builtin_clzll(product);
}

int conditions_hold(const int64_t *program, const uint64_t *words)
{
    const int64_t *exact = (const int64_t *)words;
    for (; *program != END; program += 3 + program[1] + program[2]) {
        const int64_t *operands = program + 3, *numbers = operands + program[1];
        int64_t value = exact[operands[0]];
        int holds = 0;
        switch (program[0]) {
        case SAME:
            holds = 1;
            for (int64_t i = 1; i < program[1]; i++)
                holds &= exact[operands[i]] == value;
            break;
        case WITHIN:
            holds = value >= numbers[0] && value <= numbers[1];
            break;
        case MULTIPLE:
            holds = value % numbers[0] == 0;
            break;
        case ANY_OF:
            for (int64_t i = 0; i < program[2]; i++)
                holds |= value == numbers[i];
            break;
        case CLASS:
            holds = product_class(operands, program[1], exact) == numbers[0];
            break;
        case DENSE:
            holds = dense(operands, program[1] / 2, exact);
            break;
        case LOOSE:
            holds = !dense(operands, program[1] / 2, exact);
            break;
        }
        if (!holds)
            return 0;
    }
    return 1;
}
