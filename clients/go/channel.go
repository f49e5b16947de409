package astraflow

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// DefaultTimeout is the deadline of each attempt of a unary call whose context has none.
const DefaultTimeout = 10 * time.Second

type timeoutOption struct {
	grpc.EmptyCallOption
	timeout time.Duration
}

// Timeout is a call option: the deadline of each attempt. A deadline of the context bounds all attempts together.
func Timeout(timeout time.Duration) grpc.CallOption {
	return timeoutOption{timeout: timeout}
}

type correlationKey struct{}

// Correlated returns a context whose calls carry the correlation id, which the server writes on each log line of
// theirs: 1 to 64 printable ASCII characters.
func Correlated(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, correlationKey{}, id)
}

// channel is the connection as the generated clients see it: calls carry the token, end in typed errors, and are
// repeated where the contract says that this is harmless.
type channel struct {
	following *following
	retry     RetryPolicy
	sessions  sessions
}

// Invoke is a unary call.
func (c *channel) Invoke(ctx context.Context, path string, request, reply interface{}, options ...grpc.CallOption) error {
	timeout := time.Duration(0)
	if _, isBounded := ctx.Deadline(); !isBounded {
		timeout = DefaultTimeout
	}
	for _, option := range options {
		if chosen, isTimeout := option.(timeoutOption); isTimeout {
			timeout = chosen.timeout
		}
	}
	started := time.Now()
	for failed := 1; ; failed++ {
		err := c.attempt(ctx, timeout, path, request, reply, options)
		if err == nil {
			c.following.answered()
			c.sessions.opened(reply)
			return nil
		}
		if ctx.Err() == context.Canceled {
			return ctx.Err()
		}
		refused := asError(c.following.judged(typed(err)))
		wait := c.retry.wait(failed, refused.RetryAfter)
		mayHelp := refused.Reason == Unavailable || refused.Reason == PayloadMissing
		if !mayHelp || !isHarmless(path) || time.Since(started)+wait > c.retry.Total || !pause(ctx, wait) {
			return refused
		}
	}
}

func (c *channel) attempt(
	ctx context.Context, timeout time.Duration, path string, request, reply interface{}, options []grpc.CallOption,
) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	used := c.following.take()
	defer c.following.done(used)
	ctx, err := c.outgoing(ctx, path, used)
	if err != nil {
		return err
	}
	return used.connection.Invoke(ctx, path, request, reply, options...)
}

// NewStream is a call that streams. It is never repeated, and has no deadline but that of ctx.
func (c *channel) NewStream(
	ctx context.Context, description *grpc.StreamDesc, path string, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	used := c.following.take()
	ctx, err := c.outgoing(ctx, path, used)
	if err != nil {
		c.following.done(used)
		return nil, err
	}
	opened, err := used.connection.NewStream(ctx, description, path, options...)
	if err != nil {
		c.following.done(used)
		return nil, c.following.judged(typedOrEnd(ctx, err))
	}
	go func() {
		<-opened.Context().Done()
		c.following.done(used)
	}()
	return &stream{ClientStream: opened, caller: ctx, following: c.following}, nil
}

func (c *channel) outgoing(ctx context.Context, path string, used *opened) (context.Context, error) {
	token, err := used.token()
	if err != nil {
		return nil, err
	}
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	if credential := c.sessions.of(path); credential != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "astraflow-session", credential)
	}
	if id, isSet := ctx.Value(correlationKey{}).(string); isSet {
		ctx = metadata.AppendToOutgoingContext(ctx, "x-correlation-id", id)
	}
	return ctx, nil
}

type stream struct {
	grpc.ClientStream
	caller    context.Context // the stream's own context is cancelled whenever the stream ends
	following *following
}

func (s *stream) RecvMsg(message interface{}) error {
	err := s.ClientStream.RecvMsg(message)
	if err == nil {
		s.following.answered()
	}
	return s.following.judged(typedOrEnd(s.caller, err))
}

func (s *stream) SendMsg(message interface{}) error {
	return s.following.judged(typedOrEnd(s.caller, s.ClientStream.SendMsg(message)))
}

// typedOrEnd keeps io.EOF, and the error of a context that the caller cancelled.
func typedOrEnd(ctx context.Context, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	if ctx.Err() == context.Canceled {
		return ctx.Err()
	}
	return typed(err)
}

// Follow calls each with what a server-streaming rpc sends, and opens it anew when it is lost or the server closes it:
//
//	err := astraflow.Follow(ctx, func(ctx context.Context) (dataflowv1.AdminService_WatchClient, error) {
//		return client.Admin.Watch(ctx, &dataflowv1.AdminServiceWatchRequest{})
//	}, each)
//
// It returns the error of each, that of a server that refuses or was never reached, or nil when ctx ends.
func Follow[Message any, Stream interface{ Recv() (Message, error) }](
	ctx context.Context, open func(context.Context) (Stream, error), each func(Message) error,
) error {
	wasReached := false
	for failures := 0; ctx.Err() == nil; {
		received, stopped, err := drainStream(ctx, open, each)
		if stopped != nil {
			return stopped
		}
		if received {
			wasReached, failures = true, 0
		}
		var hint time.Duration
		if err != nil && err != io.EOF {
			refused := asError(err)
			if ctx.Err() == nil && (!wasReached || !mayComeBack(refused)) {
				return refused
			}
			failures, hint = failures+1, refused.RetryAfter
		}
		pause(ctx, reconnect.wait(failures, hint))
	}
	return nil
}

func drainStream[Message any, Stream interface{ Recv() (Message, error) }](
	ctx context.Context, open func(context.Context) (Stream, error), each func(Message) error,
) (received bool, stopped, lost error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opened, err := open(ctx)
	for err == nil {
		var message Message
		if message, err = opened.Recv(); err == nil {
			received = true
			if stopped := each(message); stopped != nil {
				return received, stopped, nil
			}
		}
	}
	return received, nil, err
}
