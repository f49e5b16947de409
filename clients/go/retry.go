package astraflow

import (
	"context"
	"math/rand"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	optionsv1 "github.com/astraflow/astraflow/clients/go/astraflow/options/v1"
)

// RetryPolicy says how often, and for how long, a harmless call is repeated while the server is unreachable.
//
// No attempt starts later than Total after the first one. Waits double from FirstWait up to MaxWait, each shortened at
// random by up to half so that callers do not come back together. A wait that the server asks for takes their place,
// lengthened at random by up to half.
type RetryPolicy struct {
	Total     time.Duration
	FirstWait time.Duration
	MaxWait   time.Duration
}

// DefaultRetry is the policy of a client that was given none.
var DefaultRetry = RetryPolicy{Total: 30 * time.Second, FirstWait: 50 * time.Millisecond, MaxWait: 2 * time.Second}

// How streams come back: for as long as the server does not refuse them.
var reconnect = RetryPolicy{FirstWait: 100 * time.Millisecond, MaxWait: 2 * time.Second}

// wait returns how long to wait after failed attempt number attempt, counted from 1; the server's hint wins.
func (policy RetryPolicy) wait(attempt int, hint time.Duration) time.Duration {
	if hint > 0 {
		if hint < 10*time.Millisecond {
			hint = 10 * time.Millisecond
		}
		return hint + time.Duration(rand.Float64()*float64(hint)/2)
	}
	ceiling := policy.FirstWait
	for ; attempt > 1 && ceiling < policy.MaxWait; attempt-- {
		ceiling *= 2
	}
	if ceiling > policy.MaxWait {
		ceiling = policy.MaxWait
	}
	return time.Duration((0.5 + rand.Float64()/2) * float64(ceiling))
}

// isHarmless says whether the contract declares that repeating the rpc `/package.Service/Method` has no effect.
func isHarmless(path string) bool {
	declared, _ := option(path, optionsv1.E_Retry).(optionsv1.Retry)
	return declared == optionsv1.Retry_RETRY_READ || declared == optionsv1.Retry_RETRY_IDEMPOTENT
}

// option returns what the contract declares of the rpc `/package.Service/Method`; nil for an rpc that it does not have.
func option(path string, kind protoreflect.ExtensionType) interface{} {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(path, "/"), "/", "."))
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil
	}
	return proto.GetExtension(found.Options(), kind)
}

// pause waits; it returns early, and false, when ctx ends.
func pause(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// asError returns the typed error, whose reason is Internal for what is none.
func asError(err error) *Error {
	typedError, isTyped := typed(err).(*Error)
	if !isTyped {
		return newError(Internal, "%v", err)
	}
	return typedError
}

// mayComeBack says whether a stream that failed so is opened anew: the server is away, or has a defect; it did not
// refuse.
func mayComeBack(err *Error) bool {
	return err.Kind() == Retryable || err.Reason == Internal
}
