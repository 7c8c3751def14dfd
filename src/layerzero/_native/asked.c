/* The eager state that a function declares: questions to torch, and which of their answers a call got, as bits.
 *
 * What there is to ask stands in layerzero.core.eager_state; this file knows none of it by name.
 */
#include "hot.h"

enum { EVERYWHERE, ON_CUDA, ELSEWHERE };

enum { DL_FLOAT = 2, ON_CUDA_DEVICE = 2, ON_ROCM_DEVICE = 10 }; /* torch calls both cuda */

#define MAX_ASKED_BITS 29 /* of the word that also holds gradients, determinism, autocast and threads */

static int bits_for(Py_ssize_t answers)
{
    int bits = 0;
    for (; answers > 0; answers >>= 1)
        bits++;
    return bits; /* 0 stands for a question that was not asked */
}

/* asked: tuples of a callable, what it is called with, its answers, where it is asked, and of which bits a float must be somewhere, 0: any */
int asked_set(Function *self, PyObject *asked)
{
    int bits = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(asked); i++) {
        Asked *each = &self->asked[i];
        PyObject *callable, *given, *answers;
        if (i == MAX_ASKED) {
            PyErr_Format(PyExc_ValueError, "wanted at most %d questions", MAX_ASKED);
            return -1;
        }
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(asked, i), "OO!O!ii", &callable, &PyTuple_Type, &given, &PyTuple_Type, &answers, &each->where,
                              &each->float_bits))
            return -1;
        question_set(&each->question, callable);
        each->given = Py_NewRef(given);
        each->answers = Py_NewRef(answers);
        each->shift = bits;
        bits += bits_for(PyTuple_GET_SIZE(answers));
        self->asked_count++;
    }
    if (bits > MAX_ASKED_BITS) {
        PyErr_Format(PyExc_ValueError, "wanted answers in at most %d bits, got %d", MAX_ASKED_BITS, bits);
        return -1;
    }
    return 0;
}

void asked_drop(Function *self)
{
    for (int i = 0; i < self->asked_count; i++) {
        Py_XDECREF(self->asked[i].question.callable);
        Py_XDECREF(self->asked[i].given);
        Py_XDECREF(self->asked[i].answers);
    }
}

/* Whether a question means something for a call: its tensors' words are in the key already. */
static int means_something(const Function *self, const Asked *asked, const Key *key)
{
    int of_dtype = asked->float_bits == 0, cuda = 0;
    for (int i = 0; i < self->tensor_count; i++) {
        if (key->ndim[i] < 0)
            continue;
        uint64_t word = key->exact[key->start[i]];
        int device = (int)(word >> 40 & 0xFF);
        of_dtype |= (word >> 16 & 0xFF) == DL_FLOAT && (int)(word >> 24 & 0xFF) == asked->float_bits;
        cuda |= device == ON_CUDA_DEVICE || device == ON_ROCM_DEVICE;
    }
    return of_dtype && (asked->where == EVERYWHERE || cuda == (asked->where == ON_CUDA));
}

/* The place of an answer, counted from 1; 0: none of those that were told of; -1: error. */
static int place_of(PyObject *answers, PyObject *answer)
{
    Py_ssize_t count = PyTuple_GET_SIZE(answers);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_GET_ITEM(answers, i) == answer)
            return (int)i + 1;
    for (Py_ssize_t i = 0; i < count; i++) { /* a text that was made for this answer */
        int equal = PyObject_RichCompareBool(PyTuple_GET_ITEM(answers, i), answer, Py_EQ);
        if (equal)
            return equal < 0 ? -1 : (int)i + 1;
    }
    return 0;
}

int asked_read(const Function *self, const Key *key, uint64_t *bits)
{
    for (int i = 0; i < self->asked_count; i++) {
        const Asked *each = &self->asked[i];
        if ((each->float_bits != 0 || each->where != EVERYWHERE) && !means_something(self, each, key))
            continue;
        Py_ssize_t given = PyTuple_GET_SIZE(each->given);
        PyObject *answer = given == 0 ? question_ask(&each->question)
                                      : PyObject_Vectorcall(each->question.callable,
                                                            ((PyTupleObject *)each->given)->ob_item, (size_t)given, NULL);
        if (answer == NULL)
            return -1;
        int place = place_of(each->answers, answer);
        Py_DECREF(answer);
        if (place <= 0)
            return place;
        *bits |= (uint64_t)place << each->shift;
    }
    return 1;
}
