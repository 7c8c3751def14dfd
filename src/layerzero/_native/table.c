/* Keys to plans: one open-addressing table a policy, exact and coarse keys side by side.
 *
 * A coarse key may have several plans, each with conditions on the exact arguments; they simply follow one another in
 * the probing order, and a lookup goes on past one whose conditions do not hold. The Python table beside it owns the
 * plans, counts and evicts them; this one is its index.
 */
#include "hot.h"

#include <structmember.h>

typedef struct {
    uint64_t hash;
    uint64_t *words; /* NULL: empty */
    int count;       /* of words; coarse keys are told apart by `program` */
    int refuses_negated;
    int64_t *program;
    PyObject *plan, *run;
} Slot;

typedef struct {
    PyObject_HEAD
    Slot *slots;
    size_t capacity, held; /* capacity is a power of two */
    /* the call before: most calls are like it, and comparing costs less than hashing */
    Found last;
    int last_count;
    uint64_t last_words[MAX_EXACT_WORDS];
} Index;

static Py_ssize_t used_offset; /* where a plan keeps its reference bit */
static PyTypeObject *plan_type;

int index_setup(PyObject *used)
{
    if (!Py_IS_TYPE(used, &PyMemberDescr_Type) || ((PyMemberDescrObject *)used)->d_member->type != T_OBJECT_EX) {
        PyErr_SetString(PyExc_TypeError, "setup: wanted the slot of a plan's reference bit");
        return -1;
    }
    used_offset = ((PyMemberDescrObject *)used)->d_member->offset;
    plan_type = (PyTypeObject *)Py_NewRef(PyDescr_TYPE(used));
    return 0;
}

static inline void mark_used(PyObject *plan)
{
    PyObject **bit = (PyObject **)((char *)plan + used_offset);
    if (*bit != Py_True) /* written once after each sweep; otherwise a hit writes nothing that threads share */
        Py_XSETREF(*bit, Py_NewRef(Py_True));
}

static Slot *probe(Index *self, const uint64_t *words, int count, uint64_t hash, const uint64_t *exact)
{
    size_t mask = self->capacity - 1;
    for (size_t at = hash & mask; self->slots[at].words != NULL; at = (at + 1) & mask) {
        Slot *slot = &self->slots[at];
        if (slot->hash != hash || slot->count != count || (slot->program != NULL) != (exact != NULL) ||
            memcmp(slot->words, words, (size_t)count * sizeof words[0]) != 0)
            continue;
        if (exact == NULL || conditions_hold(slot->program, exact))
            return slot;
    }
    return NULL;
}

void index_find(PyObject *index, Function *function, Key *key, Found *found)
{
    Index *self = (Index *)index;
    if (self->last.plan != NULL && self->last_count == key->exact_count &&
        memcmp(self->last_words, key->exact, (size_t)key->exact_count * sizeof key->exact[0]) == 0) {
        *found = self->last;
        mark_used(found->plan);
        return;
    }
    found->plan = NULL;
    if (self->held == 0)
        return;
    Slot *slot = probe(self, key->exact, key->exact_count, key_hash(key->exact, key->exact_count), NULL);
    if (slot == NULL) {
        key_make_coarse(function, key);
        slot = probe(self, key->coarse, key->coarse_count, key_hash(key->coarse, key->coarse_count), key->exact);
    }
    if (slot == NULL)
        return;
    *found = (Found){slot->plan, slot->run, slot->refuses_negated};
    mark_used(found->plan);
    self->last = *found;
    self->last_count = key->exact_count;
    memcpy(self->last_words, key->exact, (size_t)key->exact_count * sizeof key->exact[0]);
}

static int grow(Index *self)
{
    size_t capacity = self->capacity ? self->capacity * 2 : 16;
    Slot *slots = PyMem_Calloc(capacity, sizeof(Slot));
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->capacity; i++) {
        if (self->slots[i].words == NULL)
            continue;
        size_t at = self->slots[i].hash & (capacity - 1);
        while (slots[at].words != NULL)
            at = (at + 1) & (capacity - 1);
        slots[at] = self->slots[i];
    }
    PyMem_Free(self->slots);
    self->slots = slots;
    self->capacity = capacity;
    return 0;
}

int index_put(PyObject *index, const uint64_t *words, int count, PyObject *plan, PyObject *run, int negated,
              int64_t *program)
{
    Index *self = (Index *)index;
    if (!Py_IS_TYPE(plan, plan_type)) {
        PyErr_Format(PyExc_TypeError, "wanted a %s, got %s", plan_type->tp_name, Py_TYPE(plan)->tp_name);
        return -1;
    }
    if (2 * (self->held + 1) > self->capacity && grow(self) < 0)
        return -1;
    uint64_t *copy = PyMem_New(uint64_t, count);
    if (copy == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(copy, words, (size_t)count * sizeof words[0]);
    uint64_t hash = key_hash(words, count);
    size_t at = hash & (self->capacity - 1);
    while (self->slots[at].words != NULL)
        at = (at + 1) & (self->capacity - 1);
    self->slots[at] = (Slot){hash, copy, count, !negated, program, Py_NewRef(plan), Py_NewRef(run)};
    self->held++;
    return 0;
}

static void release(Slot *slot)
{
    PyMem_Free(slot->words);
    PyMem_Free(slot->program);
    Py_XDECREF(slot->plan);
    Py_XDECREF(slot->run);
}

static int is_in(const Index *self, const Slot *slot)
{
    size_t mask = self->capacity - 1;
    for (size_t at = slot->hash & mask; self->slots[at].words != NULL; at = (at + 1) & mask)
        if (self->slots[at].words == slot->words)
            return 1;
    return 0;
}

/* Forget the plans with these identities, in one sweep: eviction drops many at once. */
static PyObject *index_remove(PyObject *index, PyObject *identities)
{
    Index *self = (Index *)index;
    if (!PyAnySet_Check(identities)) {
        PyErr_SetString(PyExc_TypeError, "wanted a set of the plans' identities");
        return NULL;
    }
    Slot *before = self->slots, *after = PyMem_Calloc(self->capacity ? self->capacity : 1, sizeof(Slot));
    if (after == NULL)
        return PyErr_NoMemory();
    size_t held = 0, mask = self->capacity - 1;
    for (size_t i = 0; i < self->capacity; i++) {
        if (before[i].words == NULL)
            continue;
        PyObject *identity = PyLong_FromVoidPtr(before[i].plan);
        int gone = identity == NULL ? -1 : PySet_Contains(identities, identity);
        Py_XDECREF(identity);
        if (gone < 0) {
            PyMem_Free(after);
            return NULL;
        }
        if (gone)
            continue;
        size_t at = before[i].hash & mask;
        while (after[at].words != NULL)
            at = (at + 1) & mask;
        after[at] = before[i];
        held++;
    }
    /* What was not taken over is released at last, since that runs code: the table is whole by then. */
    size_t capacity = self->capacity, removed = self->held - held;
    self->slots = after;
    self->held = held;
    self->last.plan = NULL;
    for (size_t i = 0; i < capacity; i++)
        if (before[i].words != NULL && !is_in(self, &before[i]))
            release(&before[i]);
    PyMem_Free(before);
    return PyLong_FromSize_t(removed);
}

static int index_drop(PyObject *index)
{
    Index *self = (Index *)index;
    Slot *slots = self->slots;
    size_t capacity = self->capacity;
    self->slots = NULL; /* first: what a plan's end runs must not find it */
    self->capacity = self->held = 0;
    self->last.plan = NULL;
    for (size_t i = 0; i < capacity; i++)
        if (slots[i].words != NULL)
            release(&slots[i]);
    PyMem_Free(slots);
    return 0;
}

static PyObject *index_clear(PyObject *index, PyObject *unused)
{
    (void)unused;
    index_drop(index);
    Py_RETURN_NONE;
}

static int index_traverse(PyObject *index, visitproc visit, void *arg)
{
    Index *self = (Index *)index;
    for (size_t i = 0; i < self->capacity; i++) {
        Py_VISIT(self->slots[i].plan);
        Py_VISIT(self->slots[i].run);
    }
    return 0;
}

static void index_dealloc(PyObject *index)
{
    PyObject_GC_UnTrack(index);
    index_drop(index);
    Py_TYPE(index)->tp_free(index);
}

static Py_ssize_t index_length(PyObject *index) { return (Py_ssize_t)((Index *)index)->held; }

static PyMethodDef index_methods[] = {
    {"remove", index_remove, METH_O, "Forget the plans with these identities; how many there were."},
    {"clear", index_clear, METH_NOARGS, "Forget every plan."},
    {NULL},
};

static PySequenceMethods index_sequence = {.sq_length = index_length};

PyTypeObject IndexType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "layerzero._native.hot.Index",
    .tp_doc = "The index of one table of plans.",
    .tp_basicsize = sizeof(Index),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = index_dealloc,
    .tp_traverse = index_traverse,
    .tp_clear = index_drop,
    .tp_methods = index_methods,
    .tp_as_sequence = &index_sequence,
};
