/* Shared declarations of the hit path.
 *
 *   state.c       the eager state that a call is made in, read from torch without torch's headers
 *   reader.c      what a tensor's memory looks like
 *   asked.c       the eager state that a function declares
 *   values.c      arguments that are no tensors as words
 *   key.c         a call as words: the exact key, and the coarse one of its size class
 *   conditions.c  what a plan demands of the exact arguments beyond its coarse key
 *   table.c       keys to plans
 *   bound.c       kernels with their constants in place, and callables that are bound to a plan
 *   indices.c     whether indices in memory are where they must be
 *   slots.c       where new tokens belong in a paged cache
 *   stamp.c       whether objects and memory are what they were
 *   call.c        the callable of a function: one hit from end to end
 *   module.c      declaring a function, and the module
 *
 * A call that this code does not understand in full goes to the Python callable with its original arguments: semantics
 * live there once. Everything here runs under the GIL; docs/decisions/0033 says what changes without one.
 */
#ifndef LAYERZERO_HOT_H
#define LAYERZERO_HOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "dlpack.h"

#define INTERFACE 7 /* counts what layerzero.engine.accelerator calls; a build of older sources is left out */

#define MAX_PARAMETERS 24
#define MAX_TENSORS 24
#define MAX_AXES 6         /* a tensor with more axes goes the slow way */
#define MAX_ASKED 8        /* questions about the eager state */
#define MAX_SEQUENCE 4     /* so does a tuple with more numbers */
#define MAX_EXACT_WORDS (4 + MAX_PARAMETERS * (1 + MAX_SEQUENCE) + MAX_TENSORS * (1 + 2 * MAX_AXES))
#define MAX_COARSE_WORDS (4 + MAX_PARAMETERS * (1 + MAX_SEQUENCE) + MAX_TENSORS * 2)

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* state.c */

typedef struct {
    int autocast;      /* inside torch.autocast */
    int grad;          /* gradients are recorded */
    int deterministic; /* torch.use_deterministic_algorithms */
    int threads;       /* that torch's kernels on the CPU use in this thread; 0 where nothing tells */
} EagerState;

typedef struct {
    PyObject *callable;
    PyCFunction function; /* NULL: not a builtin without arguments */
    PyObject *self;
} Question;

void question_set(Question *question, PyObject *callable);

static inline PyObject *question_ask(const Question *question)
{
    if (question->function != NULL)
        return question->function(question->self, NULL);
    return PyObject_CallNoArgs(question->callable);
}

extern PyTypeObject *tensor_type, *parameter_type, *dtype_type;
extern DLExchange *exchange;
extern long open_scopes; /* policy scopes that are open in any thread */

int state_setup(PyObject *sources);
/* 1: read; 0: a state for the slow way; -1: error */
int state_read(EagerState *state);
PyObject *state_set_scopes(PyObject *module, PyObject *count);
int inference_enabled(void);
int dynamo_listens(void); /* whether Dynamo would compile what is called now: code after a graph break */
PyObject *state_watch(PyObject *module, PyObject *callback);
int asks_for_gradients(PyObject *tensor); /* 1, 0, -1 like every question below */
int is_leaf(PyObject *tensor);
int is_inference(PyObject *tensor);
int has_negative_bit(PyObject *tensor);
int is_plain(PyObject *tensor); /* dense, with memory: what DLPack describes without raising */
PyObject *state_words(PyObject *module, PyObject *unused);

/* reader.c */

int reader_setup(void *torch_cpu, void *c10, PyObject *samples);
/* 1: read; 0: no plain tensor; -1: error. What `out` points to lives as long as the tensor is not changed. */
int read_tensor(PyObject *object, DLTensor *out);
int requires_grad(PyObject *tensor);
int is_negated(PyObject *tensor);
PyObject *reader_name(PyObject *module, PyObject *unused);

/* key.c */

typedef struct {
    uint64_t exact[MAX_EXACT_WORDS];
    uint64_t coarse[MAX_COARSE_WORDS];
    int exact_count, coarse_count;
    /* where each tensor's words start in the exact key: head, sizes, strides; and its rank, -1 where it is absent */
    int start[MAX_TENSORS], ndim[MAX_TENSORS];
    /* the memory that each tensor spans, first byte and one past the last */
    uintptr_t low[MAX_TENSORS], high[MAX_TENSORS];
} Key;

enum Kind { VALUE, SEQUENCE, BOUND, HANDLE, TENSOR, OPTIONAL_TENSOR, PASSED };

typedef struct {
    PyObject *name;          /* interned */
    PyObject *default_value; /* NULL: required */
    enum Kind kind;
    int tensor;                /* its number among the tensors, for tensors */
    PyObject *text;            /* the text that was given last: the compiler makes one object of equal ones */
    int made_of[MAX_TENSORS];  /* ends with -1. Of a handle, the parameters that it must have been made of; of what is
                                  passed, the tensor that may be given in its place */
    PyObject *kind_for;        /* what tells a handle's kind, given it and what it was made of; NULL: its own method */
    PyObject *types;           /* the exact types of what is passed, a tuple */
    double least, most;        /* bounds of a number that is passed: no key holds it, so every call is tested */
} Parameter;

typedef struct {
    int tensor;
    uint32_t apart;      /* tensors that it must not share memory with, one bit each */
    uint32_t not_start;  /* tensors that may lie in its memory, but not start where it starts */
} Mutated;

typedef struct {
    Question question;
    PyObject *given;   /* a tuple of what it is called with */
    PyObject *answers; /* a tuple of what it may answer */
    int where;         /* asked everywhere, on CUDA only, or elsewhere only */
    int float_bits;    /* asked where a tensor has floats of so many bits; 0: always */
    int shift;         /* of the place of its answer, among the bits of all */
} Asked;

typedef struct {
    PyObject_HEAD
    PyMethodDef method;
    PyObject *builtin_name, *builtin_doc; /* keep the method's texts */
    int count, positional, tensor_count, mutated_count, asked_count;
    int has_given_as; /* whether a tensor may be given in place of what is passed */
    Parameter parameters[MAX_PARAMETERS];
    int tensor_parameter[MAX_TENSORS];
    Mutated mutated[MAX_TENSORS];
    Asked asked[MAX_ASKED];
    PyObject *strings;                         /* text values seen, by value; each key holds their addresses */
    PyObject *python, *miss, *failed, *scoped; /* the slower ways */
    PyObject *unwatched;                       /* this callable without Dynamo listening; NULL until it is loaded */
    PyObject *index;                           /* of the process-wide policy's table */
    /* the arguments before that are no tensors, and their words: most calls have the very same objects */
    int seen_count; /* of words; 0: none */
    PyObject *seen[MAX_PARAMETERS];
    uint64_t seen_words[1 + MAX_PARAMETERS * MAX_SEQUENCE];
} Function;

/* 1: made; 0: a call for the slow way; -1: error */
int key_make(Function *self, PyObject *const *values, Key *key);
void key_make_coarse(Function *self, Key *key);
/* How many words stand before the first tensor's. */
int key_header(const Function *self);
uint64_t key_hash(const uint64_t *words, int count);

/* asked.c */

int asked_set(Function *self, PyObject *asked);
void asked_drop(Function *self);
/* Add the places of the answers to bits, for a key that has its tensors: 1; 0: a state for the slow way; -1: error. */
int asked_read(const Function *self, const Key *key, uint64_t *bits);

/* values.c */

/* Append the words of all arguments that are no tensors: 1; 0: a call for the slow way; -1: error. */
int put_values(Function *self, PyObject *const *values, Key *key);
static inline int bit_length(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

/* conditions.c */

/* Resolve (operation, operand, ...) tuples against the layout of one exact key; NULL with an error set. */
int64_t *conditions_parse(PyObject *conditions, const Key *key);
int conditions_hold(const int64_t *program, const uint64_t *exact);

/* table.c */

typedef struct {
    PyObject *plan; /* borrowed; NULL: not found */
    PyObject *run;
    int refuses_negated;
} Found;

extern PyTypeObject IndexType;
int index_setup(PyObject *used); /* the member that holds a plan's reference bit */
void index_find(PyObject *index, Function *function, Key *key, Found *found);
/* `negated`: whether the plan's kernel reads tensors with the negative bit rightly */
int index_put(PyObject *index, const uint64_t *words, int count, PyObject *plan, PyObject *run, int negated,
              int64_t *program);

/* indices.c: True, False, or None for what is no tensor of integers in this process's memory */

int integers(PyObject *tensor, DLTensor *out); /* 1: in this process's memory; 0: something else; -1: error */
PyObject *indices_distinct(PyObject *module, PyObject *tensor);
PyObject *indices_within(PyObject *module, PyObject *args);
PyObject *indices_firsts_within(PyObject *module, PyObject *args);

/* slots.c */

PyObject *slots_fill(PyObject *module, PyObject *args);

/* stamp.c */

PyObject *stamp_version(PyObject *module, PyObject *cls);
PyObject *stamp_places(PyObject *module, PyObject *const *args, Py_ssize_t given);
PyObject *stamp_unchanged(PyObject *module, PyObject *const *args, Py_ssize_t given);
PyObject *stamp_stands(PyObject *module, PyObject *const *args, Py_ssize_t given);
PyObject *stamp_checksum(PyObject *module, PyObject *const *args, Py_ssize_t given);
PyObject *stamp_stream(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* module.c */

extern PyTypeObject FunctionType;

/* call.c */

PyObject *call(PyObject *function, PyObject *const *args, Py_ssize_t given, PyObject *names);
/* Let Python answer for a plan that raised, while its exception is the one being handled. */
PyObject *answer_failure(PyObject *way, PyObject *plan, PyObject *const *values, int count);

/* bound.c */

extern PyTypeObject DirectType, BoundType;
PyObject *run_plan(PyObject *run, PyObject *const *values, int count);

#endif
