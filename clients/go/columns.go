package astraflow

import (
	"encoding/binary"
	"math"
	"unsafe"

	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

// Columns are the per-token columns of one trajectory of T tokens.
type Columns struct {
	TokenIDs []int32
	// LossMask is true where the token is trained on.
	LossMask []bool
	// Logprobs are natural logarithms, at most 0; 0 where the mask is false.
	Logprobs []float32
	// VersionSpans ascend; together they cover every masked position.
	VersionSpans []*rolloutv1.VersionSpan
}

var isLittleEndian = func() bool {
	one := uint16(1)
	return *(*byte)(unsafe.Pointer(&one)) == 1
}()

// EncodeColumns returns the message for columns. The error is InvalidTrajectory when lengths differ.
func EncodeColumns(columns Columns, trajectoryID string) (*rolloutv1.Trajectory, error) {
	numTokens := len(columns.TokenIDs)
	if numTokens == 0 || numTokens != len(columns.LossMask) || numTokens != len(columns.Logprobs) {
		return nil, mismatch("columns of %s must have one length ≥ 1, got %d token ids, %d of the loss mask and %d log-probs",
			trajectoryID, numTokens, len(columns.LossMask), len(columns.Logprobs))
	}
	tokens, logprobs := make([]byte, 4*numTokens), make([]byte, 4*numTokens)
	mask := make([]byte, (numTokens+7)/8)
	for t := range columns.TokenIDs {
		binary.LittleEndian.PutUint32(tokens[4*t:], uint32(columns.TokenIDs[t]))
		binary.LittleEndian.PutUint32(logprobs[4*t:], math.Float32bits(columns.Logprobs[t]))
		if columns.LossMask[t] {
			mask[t/8] |= 1 << (t % 8)
		}
	}
	return &rolloutv1.Trajectory{
		TrajectoryId: trajectoryID,
		TokenIds:     tokens,
		LogprobDtype: rolloutv1.LogprobDtype_LOGPROB_DTYPE_F32,
		Logprobs:     logprobs,
		LossMask:     mask,
		VersionSpans: columns.VersionSpans,
	}, nil
}

// DecodeColumns returns the columns of message: views of its bytes where they are aligned and in this machine's order,
// so do not change them while the message is used. The error is InvalidTrajectory when lengths disagree.
func DecodeColumns(message *rolloutv1.Trajectory) (Columns, error) {
	id, width := message.GetTrajectoryId(), 4
	if message.GetLogprobDtype() == rolloutv1.LogprobDtype_LOGPROB_DTYPE_BF16 {
		width = 2
	}
	if size := len(message.GetTokenIds()); size%4 != 0 {
		return Columns{}, mismatch("trajectory %s: token_ids holds %d bytes, not a multiple of 4", id, size)
	}
	if size := len(message.GetLogprobs()); size%width != 0 {
		return Columns{}, mismatch("trajectory %s: logprobs holds %d bytes, not a multiple of %d", id, size, width)
	}
	numTokens, numLogprobs := len(message.GetTokenIds())/4, len(message.GetLogprobs())/width
	if numTokens != numLogprobs || len(message.GetLossMask()) != (numTokens+7)/8 {
		return Columns{}, mismatch("trajectory %s: %d token ids, %d log-probs and %d mask bytes do not belong together; "+
			"expected equal counts and %d mask bytes", id, numTokens, numLogprobs, len(message.GetLossMask()), (numTokens+7)/8)
	}
	mask := make([]bool, numTokens)
	for t := range mask {
		mask[t] = message.GetLossMask()[t/8]>>(t%8)&1 == 1
	}
	columns := Columns{LossMask: mask, VersionSpans: message.GetVersionSpans()}
	columns.TokenIDs = view(message.GetTokenIds(), func(bits uint32) int32 { return int32(bits) })
	if width == 2 {
		columns.Logprobs = widened(message.GetLogprobs())
	} else {
		columns.Logprobs = view(message.GetLogprobs(), math.Float32frombits)
	}
	return columns, nil
}

// view returns raw as elements of four bytes, without a copy where that is possible.
func view[Element int32 | float32](raw []byte, read func(uint32) Element) []Element {
	size := len(raw) / 4
	if size == 0 {
		return nil
	}
	first := unsafe.Pointer(&raw[0])
	if isLittleEndian && uintptr(first)%4 == 0 {
		return unsafe.Slice((*Element)(first), size)
	}
	copied := make([]Element, size)
	for i := range copied {
		copied[i] = read(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return copied
}

// widened returns bfloat16 as float32, exactly.
func widened(raw []byte) []float32 {
	column := make([]float32, len(raw)/2)
	for i := range column {
		column[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16)
	}
	return column
}

func mismatch(format string, arguments ...interface{}) *Error {
	err := newError(InvalidTrajectory, format, arguments...)
	err.Metadata = map[string]string{"reason": "length_mismatch"}
	return err
}
