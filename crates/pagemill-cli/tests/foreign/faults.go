// Causes faults that Go turns into panics, in a program that is linked to the C library.
package main

/*
#cgo LDFLAGS: -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
static int strict_signal(void)
{
	int (*ask)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "strict_signal");
	return ask ? ask() : -1;
}
*/
import "C"
import (
	"fmt"
	"sync"
)

type record struct{ value int }

func read(from *record) (value int) {
	defer func() {
		if recover() != nil {
			value = 1
		}
	}()
	return from.value
}

func main() {
	var wait sync.WaitGroup
	sums := make([]int, 4)
	for worker := range sums {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for round := 0; round < 1000; round++ {
				sums[worker] += read(nil)
			}
		}()
	}
	wait.Wait()
	fmt.Println(sums, C.strict_signal())
}
