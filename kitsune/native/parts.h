/* What the types in C have in common. */

#ifndef KITSUNE_NATIVE_PARTS_H
#define KITSUNE_NATIVE_PARTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec facts_spec;
extern PyType_Spec plain_copy_spec;

/* Checks return 1, 0, or -1 with an exception set. */

/* Of an object, which may be NULL after an exception, and is let go. */
static inline int is_it(PyObject *found, PyObject *expected)
{
    if (found == NULL)
        return -1;
    int same = found == expected;
    Py_DECREF(found);
    return same;
}

static inline int equals(PyObject *found, PyObject *expected)
{
    if (found == NULL)
        return -1;
    int equal = PyObject_RichCompareBool(found, expected, Py_EQ);
    Py_DECREF(found);
    return equal;
}

#endif
