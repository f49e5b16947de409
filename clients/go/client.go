// Package astraflow is the client of AstraFlow's dataflow server: submit tasks, run rollout nodes, watch runs.
//
// The generated contracts are in the packages astraflow/dataflow/v1 (dataflowv1), astraflow/rollout/v1 (rolloutv1) and
// so on beneath this one. This package adds what everybody would otherwise write himself: a connection from an address
// or a join string, typed errors, repeats where the contract says that they are harmless, token columns, and streams
// that come back after a loss.
package astraflow

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	optionsv1 "github.com/astraflow/astraflow/clients/go/astraflow/options/v1"
	serverv1 "github.com/astraflow/astraflow/clients/go/astraflow/server/v1"
)

const (
	// Version is the release of this package.
	Version = "0.3.0"
	// MaxMessageBytes is the largest message in either direction.
	MaxMessageBytes = 64 << 20
)

// ContractVersion is the contract version that this package was made for.
var ContractVersion, _ = proto.GetExtension(
	serverv1.File_astraflow_server_v1_server_info_proto.Options(), optionsv1.E_ContractVersion).(uint32)

// Client has the services of one dataflow server over one connection. It is safe for concurrent use. It speaks as the
// node that it joined last, and as the trainer of its last claim; As makes one for each of several.
type Client struct {
	Runs         dataflowv1.RunServiceClient
	Tasks        dataflowv1.TaskServiceClient
	Trajectories dataflowv1.TrajectoryServiceClient
	Batches      dataflowv1.BatchServiceClient
	Versions     dataflowv1.VersionServiceClient
	Evaluations  dataflowv1.EvaluationServiceClient
	Samples      dataflowv1.SampleServiceClient
	Admin        dataflowv1.AdminServiceClient
	// Channel is what the services call through, for rpcs that none of them has.
	Channel grpc.ClientConnInterface

	following *following
}

type settings struct {
	join       Join
	joinFile   string
	files      []string // read so far, with the address and what it takes to trust and be trusted
	content    string   // of these files
	token      func() (string, error)
	tls        *tls.Config
	isInsecure bool
	retry      RetryPolicy
	session    string
}

// Option is an option of Connect.
type Option func(*settings) error

// WithToken sends the token as bearer token, in place of the join string's.
func WithToken(token string) Option {
	return func(s *settings) error {
		s.token = func() (string, error) { return token, nil }
		return nil
	}
}

// WithJoinFile takes the join string in the file in place of a target. Like all files of these options it is read again
// when it changes: calls from then on go where it says, with its authorities and its token.
func WithJoinFile(path string) Option {
	return func(s *settings) error { s.joinFile = path; return nil }
}

// WithTokenFile sends the token in the file, which is read again for each call, so that it can be replaced.
func WithTokenFile(path string) Option {
	return func(s *settings) error {
		s.token = func() (string, error) {
			content, err := os.ReadFile(path)
			if err != nil {
				return "", newError(Unavailable, "the token file cannot be read: %v", err)
			}
			return strings.TrimSpace(string(content)), nil
		}
		return nil
	}
}

// WithCAFile uses TLS and trusts the authorities in the PEM file, and no other.
func WithCAFile(path string) Option {
	return func(s *settings) error {
		content, err := s.readFile(path, "CA file")
		if err != nil {
			return err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(content) {
			return newError(InvalidArgument, "the CA file %s holds no certificate in PEM", path)
		}
		s.secure().RootCAs = pool
		return nil
	}
}

// WithPublicCA uses TLS and trusts the authorities that this machine trusts.
func WithPublicCA() Option {
	return func(s *settings) error { s.secure().RootCAs = nil; return nil }
}

// WithServerName asks for this name in the server's certificate, in place of the host of the address.
func WithServerName(name string) Option {
	return func(s *settings) error { s.join.ServerName = name; return nil }
}

// WithClientCertificate shows the certificate in the PEM file to a server that asks for one.
func WithClientCertificate(certificateFile, keyFile string) Option {
	return func(s *settings) error {
		certificate, err := s.readFile(certificateFile, "client certificate")
		if err != nil {
			return err
		}
		key, err := s.readFile(keyFile, "client key")
		if err != nil {
			return err
		}
		pair, err := tls.X509KeyPair(certificate, key)
		if err != nil {
			return newError(InvalidArgument, "the client certificate and its key do not load: %v", err)
		}
		s.secure().Certificates = []tls.Certificate{pair}
		return nil
	}
}

// WithInsecure sends the token without TLS, to whoever listens on the way. For closed test networks only.
func WithInsecure() Option {
	return func(s *settings) error { s.isInsecure = true; return nil }
}

// WithRetry repeats harmless calls by another policy than DefaultRetry; one whose Total is 0 repeats none.
func WithRetry(policy RetryPolicy) Option {
	return func(s *settings) error { s.retry = policy; return nil }
}

func (s *settings) readFile(path, name string) ([]byte, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, newError(InvalidArgument, "the %s cannot be read: %v; mount it or fix its mode", name, err)
	}
	s.files = append(s.files, path)
	s.content += string(content) + "\x00"
	return content, nil
}

func (s *settings) secure() *tls.Config {
	if s.tls == nil {
		s.tls = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	return s.tls
}

// Connect returns a client of the server at target, which is HOST:PORT (in plain text unless an option says whom to
// trust), a join string, or empty with WithJoinFile. The connection is made by the first call. Files that options name
// are read again when they change.
func Connect(target string, options ...Option) (*Client, error) {
	connections, err := follow(func() (*settings, error) { return settingsOf(target, options) })
	if err != nil {
		return nil, err
	}
	chosen := connections.now
	return newClient(&channel{following: connections, retry: chosen.retry}, chosen.session), nil
}

// As returns a client over the same connection that speaks as the holder of a credential of JoinRun or ClaimPolicy.
func (c *Client) As(credential string) *Client {
	own := c.Channel.(*channel)
	return newClient(&channel{following: own.following, retry: own.retry}, credential)
}

func newClient(calls *channel, credential string) *Client {
	calls.sessions.add(credential)
	return &Client{
		Runs:         dataflowv1.NewRunServiceClient(calls),
		Tasks:        dataflowv1.NewTaskServiceClient(calls),
		Trajectories: dataflowv1.NewTrajectoryServiceClient(calls),
		Batches:      dataflowv1.NewBatchServiceClient(calls),
		Versions:     dataflowv1.NewVersionServiceClient(calls),
		Evaluations:  dataflowv1.NewEvaluationServiceClient(calls),
		Samples:      dataflowv1.NewSampleServiceClient(calls),
		Admin:        dataflowv1.NewAdminServiceClient(calls),
		Channel:      calls,
		following:    calls.following,
	}
}

func (s *settings) dial() (*grpc.ClientConn, error) {
	security := grpc.WithInsecure() //nolint:staticcheck // Debian 12 has a gRPC without credentials/insecure
	if s.tls != nil {
		s.tls.ServerName = s.join.ServerName
		security = grpc.WithTransportCredentials(credentials.NewTLS(s.tls))
	}
	pause := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second}
	connection, err := grpc.Dial("dns:///"+s.join.Address, security, //nolint:staticcheck // as above: no NewClient
		grpc.WithUserAgent("astraflow-go/"+Version),
		grpc.WithDisableServiceConfig(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: pause, MinConnectTimeout: 5 * time.Second}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(MaxMessageBytes), grpc.MaxCallSendMsgSize(MaxMessageBytes)),
	)
	if err != nil {
		return nil, newError(InvalidArgument, "cannot connect to %s: %v", s.join.Address, err)
	}
	return connection, nil
}

func settingsOf(target string, options []Option) (*settings, error) {
	chosen := &settings{}
	for _, option := range options { // for the join file only; what they set besides comes after what a join string says
		_ = option(chosen)
	}
	chosen = &settings{joinFile: chosen.joinFile, retry: DefaultRetry}
	if err := chosen.aim(target); err != nil {
		return nil, err
	}
	_ = WithToken(chosen.join.Token)(chosen)
	for _, option := range options {
		if err := option(chosen); err != nil {
			return nil, err
		}
	}
	target = chosen.join.Address
	if token, _ := chosen.token(); token != "" && chosen.tls == nil && !chosen.isInsecure && !isLoopback(target) {
		return nil, newError(InvalidArgument, "the token for %s would travel in the clear; say whom to trust (a join "+
			"string, a CA file, or a public CA), or accept the risk with WithInsecure", target)
	}
	return chosen, nil
}

// aim takes over what a target or the join file says.
func (s *settings) aim(target string) error {
	if s.joinFile != "" {
		if target != "" {
			return newError(InvalidArgument, "both a target and a join file are given; give one of them")
		}
		content, err := s.readFile(s.joinFile, "join file")
		if err != nil {
			return err
		}
		target = string(content)
	}
	if s.joinFile == "" && !IsJoin(target) {
		s.join.Address = target
		return requireAddress(target)
	}
	join, err := ParseJoin(target)
	if err != nil {
		return err
	}
	s.join = *join
	s.secure().RootCAs, err = join.pool()
	return err
}

// ServerInfo asks the server who it is; needs no token. The error is Incompatible when this package cannot talk to it.
func (c *Client) ServerInfo(ctx context.Context, options ...grpc.CallOption) (*serverv1.ServerInfo, error) {
	answer, err := c.Admin.GetServerInfo(ctx, &dataflowv1.GetServerInfoRequest{}, options...)
	if err != nil {
		return nil, err
	}
	server := answer.GetServer()
	oldest, newest := server.GetOldestContractVersion(), server.GetContractVersion()
	switch {
	case oldest > ContractVersion:
		return nil, incompatible(c.following.current().join.Address, server, "client")
	case newest < ContractVersion:
		return nil, incompatible(c.following.current().join.Address, server, "server")
	}
	return server, nil
}

func incompatible(address string, server *serverv1.ServerInfo, older string) *Error {
	return newError(Incompatible, "the server at %s (astraflow %s) speaks contract version %d to %d, this client "+
		"(clients/go %s) %d: update the %s", address, server.GetProductVersion(), server.GetOldestContractVersion(),
		server.GetContractVersion(), Version, ContractVersion, older)
}

// Close closes the connection; calls in flight fail.
func (c *Client) Close() error {
	return c.following.close()
}
