/* Arguments that are no tensors as words: a tag of what each is, and its value. */
#include "hot.h"

enum { ABSENT, NUMBER_NONE, NUMBER_BOOL, NUMBER_INT, NUMBER_FLOAT, TEXT, NUMBERS, DTYPE = NUMBERS + MAX_SEQUENCE + 1, GIVEN };

#define MAX_STRINGS 1024 /* a caller that makes up ever new texts is not remembered beyond this */

/* The one text of this value that keys may hold the address of; NULL without error: no key. */
static PyObject *known_text(Function *self, Parameter *parameter, PyObject *text)
{
    if (text == parameter->text)
        return text;
    PyObject *found = PyDict_GetItemWithError(self->strings, text);
    if (found == NULL && !PyErr_Occurred() && PyDict_GET_SIZE(self->strings) < MAX_STRINGS &&
        PyDict_SetItem(self->strings, text, text) == 0)
        found = text;
    parameter->text = found; /* borrowed of the dictionary, which forgets nothing */
    return found;
}

static int put_integer(uint64_t *word, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    *word = (uint64_t)number;
    return !overflow;
}

/* Numbers that are instances of float or tuple (a NumPy float, a Size) count as what they stand for, as plans do. */
static int put_value(Function *self, Parameter *parameter, PyObject *value, uint64_t *tag, uint64_t *word)
{
    *word = 0;
    if (value == Py_None) {
        *tag = NUMBER_NONE;
    } else if (value == Py_True || value == Py_False) {
        *tag = NUMBER_BOOL;
        *word = value == Py_True;
    } else if (PyFloat_Check(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        *tag = NUMBER_FLOAT;
        memcpy(word, &number, sizeof number);
    } else if (PyLong_CheckExact(value)) {
        *tag = NUMBER_INT;
        return put_integer(word, value);
    } else if (PyUnicode_CheckExact(value)) {
        PyObject *text = known_text(self, parameter, value);
        *tag = TEXT;
        *word = (uint64_t)(uintptr_t)text;
        return text != NULL ? 1 : PyErr_Occurred() ? -1 : 0;
    } else if (Py_TYPE(value) == dtype_type) {
        *tag = DTYPE;
        *word = (uint64_t)(uintptr_t)value; /* each is one object for as long as torch is there */
    } else {
        return 0;
    }
    return 1;
}

/* A tuple or list of integers, or what stands in its place. Always the same number of words. */
static int put_sequence(Function *self, Parameter *parameter, PyObject *value, uint64_t *tag, uint64_t *words)
{
    memset(words, 0, MAX_SEQUENCE * sizeof words[0]);
    if (!PyTuple_Check(value) && !PyList_CheckExact(value))
        return put_value(self, parameter, value, tag, words);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    if (count > MAX_SEQUENCE)
        return 0;
    *tag = NUMBERS + (uint64_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number = PySequence_Fast_GET_ITEM(value, i);
        if (!PyLong_CheckExact(number) || !put_integer(&words[i], number))
            return 0;
    }
    return 1;
}

/* A bound by the power of two above it. */
static int put_bound(PyObject *value, uint64_t *tag, uint64_t *word)
{
    *tag = NUMBER_NONE;
    *word = 0;
    if (value == Py_None)
        return 1;
    *tag = NUMBER_INT;
    if (!PyLong_CheckExact(value) || !put_integer(word, value) || (int64_t)*word < 1)
        return 0;
    *word = (uint64_t)bit_length(*word - 1);
    return 1;
}

static int has_type(const Parameter *parameter, PyObject *value)
{
    Py_ssize_t count = PyTuple_GET_SIZE(parameter->types);
    for (Py_ssize_t i = 0; i < count; i++)
        if ((PyObject *)Py_TYPE(value) == PyTuple_GET_ITEM(parameter->types, i))
            return 1;
    return count == 0;
}

/* What is passed chooses nothing but by being there; its type and bounds are tested on every call. */
static int may_be_passed(const Parameter *parameter, PyObject *value)
{
    if (value == Py_None)
        return parameter->default_value == Py_None;
    if (!has_type(parameter, value))
        return 0;
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        return number >= parameter->least && number <= parameter->most;
    }
    if (!PyLong_CheckExact(value))
        return 1;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && (double)number >= parameter->least && (double)number <= parameter->most;
}

/* A handle by its kind, which it tells for the tensors of this call. */
static int put_handle(Function *self, Parameter *parameter, PyObject *const *values, PyObject *value,
                      uint64_t *tag, uint64_t *word)
{
    static PyObject *kind_for;
    if (value == Py_None)
        return put_value(self, parameter, value, tag, word);
    if (kind_for == NULL && (kind_for = PyUnicode_InternFromString("kind_for")) == NULL)
        return -1;
    if (parameter->types != NULL && !has_type(parameter, value))
        return 0;
    PyObject *arguments[1 + MAX_TENSORS] = {value};
    size_t count = 1;
    for (const int *each = parameter->made_of; *each >= 0; each++)
        arguments[count++] = values[*each];
    PyObject *kind = parameter->kind_for == NULL ? PyObject_VectorcallMethod(kind_for, arguments, count, NULL)
                                                 : PyObject_Vectorcall(parameter->kind_for, arguments, count, NULL);
    if (kind == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* no handle: the Python callable says so */
        return 0;
    }
    int put = PyUnicode_CheckExact(kind) ? put_value(self, parameter, kind, tag, word) : 0;
    Py_DECREF(kind);
    return put;
}

static inline int is_tensor(const Parameter *parameter)
{
    return parameter->kind == TENSOR || parameter->kind == OPTIONAL_TENSOR;
}

static int same_values(Function *self, PyObject *const *values, Key *key)
{
    if (self->seen_count == 0)
        return 0;
    for (int i = 0; i < self->count; i++) {
        if (values[i] == self->seen[i] || is_tensor(&self->parameters[i]))
            continue;
        int alike = self->parameters[i].kind == PASSED && (values[i] == Py_None) == (self->seen[i] == Py_None);
        if (!alike || !may_be_passed(&self->parameters[i], values[i]))
            return 0;
    }
    memcpy(key->exact + key->exact_count, self->seen_words, (size_t)self->seen_count * sizeof self->seen_words[0]);
    key->exact_count += self->seen_count;
    return 1;
}

/* Remember values that cannot change: what was a list may have other numbers now, a handle another kind. */
static void remember_values(Function *self, PyObject *const *values, const Key *key, int start)
{
    for (int i = 0; i < self->count; i++)
        if (!is_tensor(&self->parameters[i]) &&
            (PyList_Check(values[i]) || (self->parameters[i].kind == HANDLE && values[i] != Py_None)))
            return;
    self->seen_count = 0;
    for (int i = 0; i < self->count; i++)
        if (!is_tensor(&self->parameters[i]) && values[i] != self->seen[i])
            Py_XSETREF(self->seen[i], Py_NewRef(values[i]));
    self->seen_count = key->exact_count - start;
    memcpy(self->seen_words, key->exact + start, (size_t)self->seen_count * sizeof self->seen_words[0]);
}

int put_values(Function *self, PyObject *const *values, Key *key)
{
    if (same_values(self, values, key))
        return 1;
    uint64_t tags = 0; /* four bits each, at most sixteen in a word; a function has few arguments that are no tensors */
    int shift = 0;
    int tags_at = key->exact_count++;
    for (int i = 0; i < self->count; i++) {
        Parameter *parameter = &self->parameters[i];
        uint64_t tag = ABSENT, *words = key->exact + key->exact_count;
        int made = 1, width = 1;
        switch (parameter->kind) {
        case TENSOR:
        case OPTIONAL_TENSOR:
            continue;
        case VALUE:
            made = put_value(self, parameter, values[i], &tag, words);
            break;
        case SEQUENCE:
            made = put_sequence(self, parameter, values[i], &tag, words);
            width = MAX_SEQUENCE;
            break;
        case BOUND:
            made = put_bound(values[i], &tag, words);
            break;
        case PASSED:
            made = may_be_passed(parameter, values[i]);
            tag = values[i] == Py_None ? NUMBER_NONE : GIVEN;
            *words = 0;
            break;
        case HANDLE:
            made = put_handle(self, parameter, values, values[i], &tag, words);
            break;
        }
        if (made <= 0)
            return made;
        tags |= tag << shift;
        shift += 4;
        key->exact_count += width;
    }
    key->exact[tags_at] = tags;
    remember_values(self, values, key, tags_at);
    return 1;
}
