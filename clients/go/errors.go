package astraflow

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reason says what went wrong, as a stable slug: the reason of google.rpc.ErrorInfo in the domain `astraflow`.
type Reason string

// Reasons that travel; docs/contracts.md says which rpc answers which.
const (
	Unknown            Reason = "UNKNOWN"
	Unavailable        Reason = "UNAVAILABLE"
	DeadlineExceeded   Reason = "DEADLINE_EXCEEDED"
	UnknownVersion     Reason = "UNKNOWN_VERSION"
	PayloadMissing     Reason = "PAYLOAD_MISSING"
	ResourceExhausted  Reason = "RESOURCE_EXHAUSTED"
	InvalidArgument    Reason = "INVALID_ARGUMENT"
	InvalidTrajectory  Reason = "INVALID_TRAJECTORY"
	InvalidRecipe      Reason = "INVALID_RECIPE"
	PluginFailed       Reason = "PLUGIN_FAILED"
	NotFound           Reason = "NOT_FOUND"
	UntrustedServer    Reason = "UNTRUSTED_SERVER" // raised by clients: a certificate does not prove what it must
	Fenced             Reason = "FENCED"
	PolicyHeld         Reason = "POLICY_HELD"
	LeaseLost          Reason = "LEASE_LOST"
	Conflict           Reason = "CONFLICT"
	VersionGap         Reason = "VERSION_GAP"
	FailedPrecondition Reason = "FAILED_PRECONDITION"
	Incompatible       Reason = "INCOMPATIBLE"
	Unauthenticated    Reason = "UNAUTHENTICATED"
	PermissionDenied   Reason = "PERMISSION_DENIED"
	Unimplemented      Reason = "UNIMPLEMENTED"
	Internal           Reason = "INTERNAL"
)

// Kind says what the caller does next.
type Kind string

// Kinds of reasons.
const (
	// Retryable: the same call may succeed later without any change.
	Retryable Kind = "retryable"
	// Request: the request is wrong; sending it again will fail again.
	Request Kind = "request"
	// State: the world moved on; drop what you hold and start from a fresh read.
	State Kind = "state"
	// Other: none of these.
	Other Kind = "other"
)

type facts struct {
	kind Kind
	code codes.Code
}

var reasons = map[Reason]facts{
	Unknown:            {Other, codes.Unknown},
	Unavailable:        {Retryable, codes.Unavailable},
	DeadlineExceeded:   {Retryable, codes.DeadlineExceeded},
	UnknownVersion:     {Retryable, codes.Unavailable},
	PayloadMissing:     {Retryable, codes.Aborted},
	ResourceExhausted:  {Retryable, codes.ResourceExhausted},
	InvalidArgument:    {Request, codes.InvalidArgument},
	InvalidTrajectory:  {Request, codes.InvalidArgument},
	InvalidRecipe:      {Request, codes.InvalidArgument},
	PluginFailed:       {Request, codes.FailedPrecondition},
	NotFound:           {Request, codes.NotFound},
	UntrustedServer:    {Request, codes.Unavailable},
	Fenced:             {State, codes.FailedPrecondition},
	PolicyHeld:         {State, codes.FailedPrecondition},
	LeaseLost:          {State, codes.FailedPrecondition},
	Conflict:           {State, codes.AlreadyExists},
	VersionGap:         {State, codes.FailedPrecondition},
	FailedPrecondition: {State, codes.FailedPrecondition},
	Incompatible:       {State, codes.FailedPrecondition},
	Unauthenticated:    {Other, codes.Unauthenticated},
	PermissionDenied:   {Other, codes.PermissionDenied},
	Unimplemented:      {Other, codes.Unimplemented},
	Internal:           {Other, codes.Internal},
}

// Error is every error of this package but those of contexts. Its message says what was wrong, its value, the limit
// and the remedy, for people; programs decide by Reason or Kind.
type Error struct {
	Reason  Reason
	Message string
	// Metadata is what the server says of it; `correlation_id` finds the call in the server's log.
	Metadata map[string]string
	// RetryAfter is how long the server asks to wait before the next call; 0 when it does not.
	RetryAfter time.Duration
	cause      error
}

func (e *Error) Error() string {
	if strings.HasPrefix(e.Message, string(e.Reason)+":") {
		return e.Message
	}
	return fmt.Sprintf("%s: %s", e.Reason, e.Message)
}

// Unwrap returns what the error was made from.
func (e *Error) Unwrap() error { return e.cause }

// Kind says what the caller does next.
func (e *Error) Kind() Kind { return reasons[e.Reason].kind }

// Code is the status code that the reason travels with.
func (e *Error) Code() codes.Code { return reasons[e.Reason].code }

// GRPCStatus lets status.Code and status.Convert read the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code(), e.Message) }

// ReasonOf returns the reason of an error of this package, however wrapped, and "" of any other.
func ReasonOf(err error) Reason {
	var typed *Error
	if errors.As(err, &typed) {
		return typed.Reason
	}
	return ""
}

func newError(reason Reason, format string, arguments ...interface{}) *Error {
	return &Error{Reason: reason, Message: fmt.Sprintf(format, arguments...)}
}

// names of the codes as every language writes them.
var codeNames = map[codes.Code]Reason{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
	codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
	codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE",
	codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}

var (
	tooLarge      = regexp.MustCompile(`larger than (max|configured)`)
	untrusted     = regexp.MustCompile(`authentication handshake failed: (?:tls|x509|remote error)`)
	cannotEncode  = "error while marshaling"
	endedEarly    = regexp.MustCompile(`^(unexpected EOF|stream terminated by RST_STREAM|transport is closing)`)
	meaningByCode = map[codes.Code]bool{
		codes.Unavailable: true, codes.DeadlineExceeded: true, codes.ResourceExhausted: true,
		codes.InvalidArgument: true, codes.NotFound: true, codes.Unauthenticated: true,
		codes.PermissionDenied: true, codes.Unimplemented: true,
	}
)

// typed translates what a call ended with: by the reason of its ErrorInfo, else by its status code.
func typed(err error) error {
	if err == nil || ReasonOf(err) != "" {
		return err
	}
	refused := status.Convert(err)
	if found := fromDetails(refused); found != nil {
		found.cause = err
		return found
	}
	found := fromCode(refused)
	found.cause = err
	return found
}

func fromDetails(refused *status.Status) *Error {
	var found *Error
	var wait time.Duration
	for _, detail := range refused.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() != "astraflow" {
				continue
			}
			reason := Reason(detail.GetReason())
			if _, isKnown := reasons[reason]; !isKnown {
				reason = Internal
			}
			found = &Error{Reason: reason, Message: refused.Message(), Metadata: detail.GetMetadata()}
		case *errdetails.RetryInfo:
			wait = detail.GetRetryDelay().AsDuration()
		}
	}
	if found != nil {
		found.RetryAfter = wait
	}
	return found
}

func fromCode(refused *status.Status) *Error {
	code, message := refused.Code(), refused.Message()
	if message == "" {
		message = "the server gave no message"
	}
	text := fmt.Sprintf("%s: %s", codeNames[code], message)
	switch {
	case code == codes.ResourceExhausted && tooLarge.MatchString(message):
		return newError(InvalidArgument, "%s; send less in one call: split it, or shorten the episode", text)
	case code == codes.Internal && strings.Contains(message, cannotEncode):
		return newError(InvalidArgument, "%s", message)
	case code == codes.Unavailable && untrusted.MatchString(message):
		return newError(UntrustedServer, "%s; get the join string or the CA file of this server, and compare the clocks", text)
	case code == codes.Internal && endedEarly.MatchString(message):
		return newError(Unavailable, "UNAVAILABLE: %s", message)
	case meaningByCode[code]:
		return newError(codeNames[code], "%s", text)
	}
	return newError(Internal, "%s", text)
}
