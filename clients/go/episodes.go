package astraflow

import (
	"google.golang.org/protobuf/proto"

	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

// TrajectoryItem returns what a node pushes of one policy's tokens: the columns as bytes, and what follows from them
// filled into header, which needs TrajectoryId, PolicyId, Reward and FinishReason. The log-probs refer to sampling.
//
// The error is InvalidTrajectory when lengths differ, nothing is trained on, or a trained token is in no span.
func TrajectoryItem(
	header *rolloutv1.TrajectoryHeader, columns Columns, sampling *rolloutv1.SamplingParams, turns ...*rolloutv1.TurnSpan,
) (*rolloutv1.TrajectoryItem, error) {
	body, err := EncodeColumns(columns, header.GetTrajectoryId())
	if err != nil {
		return nil, err
	}
	body.Sampling, body.TurnSpans = sampling, turns
	header = proto.Clone(header).(*rolloutv1.TrajectoryHeader)
	header.NumTokens = uint32(len(columns.TokenIDs))
	for token, isTrained := range columns.LossMask {
		if !isTrained {
			continue
		}
		version, isCovered := versionAt(columns.VersionSpans, uint32(token))
		if !isCovered {
			err := newError(InvalidTrajectory, "trajectory %s: token %d is trained on and in no version span; name the "+
				"version it was sampled under", header.GetTrajectoryId(), token)
			err.Metadata = map[string]string{"reason": "bad_spans"}
			return nil, err
		}
		if header.NumTrainableTokens == 0 || version < header.MinVersion {
			header.MinVersion = version
		}
		if version > header.MaxVersion {
			header.MaxVersion = version
		}
		header.NumTrainableTokens++
	}
	if header.NumTrainableTokens == 0 {
		return nil, newError(InvalidTrajectory, "trajectory %s: no token is trained on; leave it out of the episode",
			header.GetTrajectoryId())
	}
	encoded, err := proto.Marshal(body)
	if err != nil {
		return nil, newError(InvalidTrajectory, "trajectory %s: %v", header.GetTrajectoryId(), err)
	}
	return &rolloutv1.TrajectoryItem{Header: header, Body: encoded}, nil
}

// FinishedEpisode returns the finished episode of one member of lease.
func FinishedEpisode(
	lease *rolloutv1.Lease, nodeID, episodeID string, member uint32, trajectories ...*rolloutv1.TrajectoryItem,
) *rolloutv1.Episode {
	return &rolloutv1.Episode{
		RunId:        lease.GetRunId(),
		TaskId:       lease.GetTask().GetTaskId(),
		EpisodeId:    episodeID,
		Member:       member,
		Attempt:      lease.GetAttempt(),
		NodeId:       nodeID,
		LeaseId:      lease.GetLeaseId(),
		Status:       rolloutv1.EpisodeStatus_EPISODE_STATUS_FINISHED,
		Trajectories: trajectories,
	}
}

func versionAt(spans []*rolloutv1.VersionSpan, token uint32) (uint64, bool) {
	for _, span := range spans {
		if span.GetStart() <= token && token < span.GetEnd() {
			return span.GetVersion(), true
		}
	}
	return 0, false
}
