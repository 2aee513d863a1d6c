/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BINDINGS_TORCH_PYTHON_H
#define EP_BINDINGS_TORCH_PYTHON_H

/**
 * Python's stable interface, as far as it is used: so no headers of a Python are needed, and one
 * library does for all.
 */

#include <stddef.h>

extern char _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct, PyTuple_Type;
void *PyTuple_GetItem(void *tuple, ptrdiff_t at); /* borrowed */
ptrdiff_t PyTuple_Size(void *tuple);
void *PyTuple_New(ptrdiff_t size);
void *PyTuple_Pack(ptrdiff_t size, ...);                    /* shares the items */
int PyTuple_SetItem(void *tuple, ptrdiff_t at, void *item); /* takes the reference */
void *PyType_GenericAlloc(void *type, ptrdiff_t count);
void *PyDict_New(void);
int PyDict_SetItem(void *dict, void *key, void *value);
void *PyList_New(ptrdiff_t size);
int PyList_SetItem(void *list, ptrdiff_t at, void *item); /* likewise */
void *PyLong_AsVoidPtr(void *number);
long long PyLong_AsLongLong(void *number);
void *PyLong_FromLong(long number);
void *PyErr_Occurred(void);
void PyErr_Clear(void);
void *PyLong_FromLongLong(long long number);
void *PyLong_FromVoidPtr(void *pointer);
void *PyBytes_FromStringAndSize(const char *bytes, ptrdiff_t size);
int PyObject_IsInstance(void *object, void *type);
void *PyObject_GetAttr(void *object, void *name);
void *PyObject_Call(void *function, void *arguments, void *keywords);
void *PyObject_CallFunctionObjArgs(void *function, ...);
void Py_IncRef(void *object);
void Py_DecRef(void *object);
void *PyEval_SaveThread(void); /* lets other threads of Python run */
void PyEval_RestoreThread(void *state);
void *PyCapsule_New(void *pointer, const char *name, void (*end)(void *capsule));
void *PyCapsule_GetPointer(void *capsule, const char *name);

typedef void *Function(void *self, void *const *arguments, ptrdiff_t count);

typedef struct PyMethodDef {
    const char *name;
    Function *function;
    int flags;
    const char *words;
} PyMethodDef;

#define METH_FASTCALL 0x80
void *PyCFunction_NewEx(PyMethodDef *method, void *self, void *module);

#endif
